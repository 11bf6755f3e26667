"""What the options of `driftline dump` choose: the seed's, and ours."""

from __future__ import annotations

import json

import pytest
import torch

from driftline import open_run
from driftline.cli.main import main


def keys(dumped):
    return [(r.key.site, r.key.port, r.key.step, r.key.visit) for r in dumped.run.records]


def sites(dumped):
    return {r.key.site for r in dumped.run.records}


def test_ids_choose_places_with_or_without_what_is_below(quick):
    dumped = quick("-ids", "1,", "3", "-stp", "1", run=["infer.py"])
    assert sites(dumped) == {"body", "body.0", "body.1", "last"}
    assert {r.key.port for r in dumped.run.records} == {"output"}
    dumped = quick("-ids", "1，3", "-child", "no", "--force", run=["infer.py"])
    assert sites(dumped) == {"body", "last"}


def test_ranges_and_names_choose_steps_and_classes(quick):
    dumped = quick("-er", "1,2,4,4", "-opname", "LIN, norm", run=["infer.py", "6"])
    assert dumped.code == 0, dumped.err
    assert {r.key.step for r in dumped.run.records} == {1, 2, 4}
    assert sites(dumped) == {"first", "body.0", "last", "norm"}
    assert ("norm", "output", 1, 1) in keys(dumped)  # called twice: the second call is a visit
    assert "steps 0, 3, 5 ran and were not selected (3 in all)" in dumped.err


def test_both_times_keep_inputs_under_distinct_keys(quick, workshop):
    (workshop / "inplace.py").write_text(
        "import torch\n"
        "class Doubles(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.mul_(2)\n"
        "torch.nn.Sequential(Doubles(), torch.nn.Linear(1, 1))(torch.ones(1))\n"
    )
    dumped = quick("-time", "2", "--site", "0", run=["inplace.py"])
    assert dumped.code == 0, dumped.err
    found = {
        r.key.moment: float(h.numpy()[0])
        for h in dumped.run.tensors()
        if (r := h.record).key.port == "input"
    }
    assert found == {"before": 1.0, "after": 2.0}


def test_descriptions_only_store_no_values(quick):
    dumped = quick("-sd", "-tiling", run=["infer.py"])
    assert dumped.code == 0, dumped.err
    assert len(dumped.run) == 16
    assert {r.kept for r in dumped.run.records} == {"describe"}
    assert not list(dumped.path.rglob("*.safetensors"))
    assert "tiling data were asked for" in dumped.err


def test_a_module_tree_alone_is_a_success(quick, workshop):
    (workshop / "loads.py").write_text(
        "from model import run\nfrom torch.utils.data import DataLoader\n"
        "run()\nprint(len(list(DataLoader([1, 2], num_workers=1))))\n"
    )
    dumped = quick("--type", "model", "layer", run=["loads.py"])
    assert dumped.code == 0, dumped.err
    assert "module tree of 1 process" in dumped.err
    tree = json.loads((dumped.path / "rank0" / "topology.json").read_text())
    assert [child["site"] for child in tree["roots"][0]["children"]] == [
        "first",
        "body",
        "norm",
        "last",
    ]
    assert len(dumped.run) == 0


@pytest.mark.parametrize(
    "steps", ["2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("1", "3"))]
)
def test_a_module_tree_speaks_of_no_steps_however_many_ran(quick, steps):
    dumped = quick("--type", "model,layer", run=["infer.py", steps])
    assert dumped.code == 0, dumped.err
    assert "module tree of 1 process" in dumped.err and "selected" not in dumped.err


def test_the_seeds_layout_is_written_on_request(quick, workshop):
    dumped = quick("--layout", "ait", "-er", "0,1", run=["infer.py", "2"])
    assert dumped.code == 0, dumped.err
    [folder] = (workshop / "out" / "ait_dump" / "torch_tensors").iterdir()
    assert folder.name.startswith("cpu_")
    tree = json.loads((folder / "model_tree.json").read_text())
    assert (tree["name"], tree["type"]) == ("root", "Net")
    assert [c["name"] for c in tree["children"]][:2] == ["root.first", "root.body"]
    saved = torch.load(folder / "1" / "root.first" / "input_0.pth", weights_only=True)
    assert torch.equal(saved, torch.full((2, 4), 2.0))
    assert (folder / "0" / "root.norm" / "output.visit1.pth").exists()
    assert "32 tensors" in dumped.err and "steps 0-1" in dumped.err
    # A second program adds its process, as the original does; --force replaces all.
    again = quick("--layout", "ait", run=["infer.py"])
    assert again.code == 0 and "1 process" in again.err and "step 0" in again.err
    assert len(list((workshop / "out" / "ait_dump" / "torch_tensors").iterdir())) == 2
    anew = quick("--layout", "ait", "--force", run=["infer.py"])
    assert anew.code == 0
    assert len(list((workshop / "out" / "ait_dump" / "torch_tensors").iterdir())) == 1


@pytest.mark.parametrize("words", [("-sd",), ("--keep", "summary")])
def test_the_seeds_layout_holds_descriptions_and_summaries(quick, workshop, words):
    dumped = quick("--layout", "ait", *words, run=["infer.py"])
    assert dumped.code == 0, dumped.err
    run = open_run(workshop / "out")
    wanted = "describe" if words == ("-sd",) else "summary"
    assert {record.kept for record in run.records} == {wanted}
    record = run.get("first", "output").record
    assert (record.dtype, record.shape, record.class_name) == ("float32", (2, 8), "Linear")
    assert f"{len(run)} tensors" in dumped.err


def test_time_3_is_inputs_before_and_outputs_after(quick, workshop):
    dumped = quick("-time", "3", run=["infer.py"])
    assert dumped.code == 0, dumped.err
    moments = {(r.key.port, r.key.moment) for r in dumped.run.records}
    assert moments == {("input", "before"), ("output", "after")}


def test_debug_says_more_than_info(quick):
    usual = quick("-l", "info", run=["infer.py"])
    more = quick("-l", "debug", "--force", run=["infer.py", "1", "--hf-token", "Zq7"])
    assert usual.code == more.code == 0
    assert set(usual.err.splitlines()[-1:]) < set(more.err.splitlines())
    assert "module calls" in more.err and "debug: command" in more.err
    assert "--hf-token '***'" in more.err and "Zq7" not in more.err
    chosen = quick(
        "-l", "debug", "-er", "0,1", "-ids", "1", "-stp", "1", "--force", run=["infer.py"]
    )
    assert "debug: selected: ids 1 and all below them; steps 0-1; outputs only" in chosen.err


@pytest.mark.parametrize("level", ["warning", "error", "fatal", "critical"])
def test_the_other_levels_of_the_document_only_say_what_is_wrong(quick, level):
    dumped = quick("-l", level, run=["infer.py"])
    assert (dumped.code, dumped.err) == (0, "")


def test_a_size_limit_is_kept_and_foretold(quick):
    dumped = quick("--step", "*", "--max-bytes", "1kB", run=["infer.py", "8"])
    assert dumped.code == 0, dumped.err
    assert "the first step takes" in dumped.err and "limit of" in dumped.err
    stored = {r.blob for r in dumped.run.records if r.blob is not None}
    assert sum(blob.length for blob in stored) <= 1000
    assert max(r.key.step for r in dumped.run.records) < 7
    assert "reached its size limit" in dumped.err


def test_what_a_limit_left_out_is_one_sentence_in_either_layout(quick):
    dumped = quick("--max-bytes", "100", run=["infer.py", "2"])
    lost = [r for r in dumped.run.records if r.blob is None]
    assert "the first step does not fit into the limit" in dumped.err
    assert f"{len(lost)} tensors without values, rank0/step0/" in dumped.err
    assert dumped.err.count("beyond the size limit") == 1
    tree = quick("--layout", "ait", "--force", "--max-bytes", "100", run=["infer.py", "2"])
    assert tree.code == 0 and "note: stopped before rank0/step0/" in tree.err


def test_summaries_and_class_globs(quick):
    dumped = quick(
        "--keep", "summary", "--class", "*Norm", "--port", "output", "-l", "error",
        run=["infer.py", "1", "--api-key", "hunter2-hunter2"],
    )  # fmt: skip
    assert dumped.code == 0
    assert dumped.err == ""  # nothing went wrong, and only errors were to be said
    assert sites(dumped) == {"norm"}
    assert all(r.summary is not None and r.blob is None for r in dumped.run.records)
    kept = [path.read_text() for path in dumped.path.rglob("*.json*")]
    assert any("--api-key" in text for text in kept)
    assert not any("hunter2" in text for text in kept)


def test_a_pattern_may_name_operators(quick):
    dumped = quick("--level", "ops", "--class", "aten.addmm*", run=["infer.py"])
    assert dumped.code == 0 and {r.class_name for r in dumped.run.records} == {"aten.addmm.default"}
    assert "matches no" not in dumped.err


def test_gradients_are_a_level(quick, workshop):
    (workshop / "train.py").write_text(
        "import torch\nfrom model import Net\n"
        "net = Net()\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    opt.zero_grad(); net(torch.ones(2, 4)).sum().backward(); opt.step()\n"
    )
    dumped = quick("--level", "modules", "gradients", "-er", "0,1", run=["train.py"])
    assert dumped.code == 0, dumped.err
    ports = {r.key.port for r in dumped.run.records}
    assert {"input", "output", "grad_output", "param_grad"} <= ports
    assert {r.key.step for r in dumped.run.records} == {0, 1}


def test_a_dry_run_prints_the_plan_and_runs_nothing(workshop, capsys):
    code = main(
        ["dump", "--dry-run", "-er", "3,5,7,7", "-device", "1", "--exec", "python x.py 'a > b'"]
    )
    plan = json.loads(capsys.readouterr().out)
    assert code == 0
    assert plan["command"] == ["python", "x.py", "a > b"]
    assert plan["selection"] == {"steps": ["3-5", "7-7"], "device": 1}
    assert not list(workshop.glob("driftline_*"))


BAD = [
    (["--exec", "python x.py > log"], "cannot do '>'", "bash script.sh"),
    (["--exec", "python x.py 2>&1 | tee log"], "cannot do '>&'", "script"),
    (["--exec", "a && b"], "cannot do '&&'", "script"),
    (["--exec", "cd x; python y.py"], "cannot do ';'", "script"),
    (["--exec", "python 'x.py"], "no closing quotation", "close every"),
    (["--exec", "no-such-program-here x"], "command not found: no-such-program-here", ""),
    (["--exec", "./infer.py"], "./infer.py is not executable", "python ./infer.py"),
    (
        ["--port", "grad_*", "--exec", "python x.py"],
        "port 'grad_*' is not seen at level modules",
        "add the level gradients",
    ),
    (["--exec", "LANG=C python x.py"], "command not found: LANG=C", "env LANG=C"),
    ([], "no program to run", "--exec"),
    (["--exec", "true", "--", "true"], "given twice", ""),
    (["-time2", "--", "true"], "no option -time2", "-time"),
    (["-opnam", "x", "--", "true"], "no option -opnam", "-opname"),
    (["-er", "-1,3", "--", "true"], "from 0 upwards", "-er 0,3"),
    (["-er", "1,2,3", "--", "true"], "odd one left over", "3,3"),
    (["-er", "a,b", "--", "true"], "'a' is no number", ""),
    (["-er", "5,3", "--", "true"], "ends before it begins", "3,5"),
    (["-er", "1,1", "--step", "2", "--", "true"], "given twice", ""),
    (["-ids", "2,x", "--", "true"], "'x' is not an id", "3_1"),
    (["-child", "maybe", "--", "true"], "true or false", ""),
    (["-time", "4", "--", "true"], "-time takes 0, 1, 2 or 3", ""),
    (["--type", "onnx", "--", "true"], "what model or layer hold", "--type model onnx"),
    (["--type", "op", "onnx", "--", "true"], "neither is given", "--type layer onnx"),
    (["--type", "tensro", "--", "true"], "--type takes", "tensor"),
    (["--max-bytes", "lots", "--", "true"], "such as 500MB", ""),
    (["--keep", "all", "--", "true"], "no reduction 'all'", ""),
    (["-sd", "--keep", "summary", "--", "true"], "descriptions only", ""),
    (["--layout", "ait", "--keep", "digest", "--", "true"], "has no place for 'digest'", ""),
    (["--port", "outputs", "--", "true"], "no port matches 'outputs'", "output"),
    (["-l", "loud", "--", "true"], "takes debug, info", ""),
    (["-device", "-2", "--", "true"], "from 0 upwards", ""),
    (["stray", "--", "true"], "'stray' is no option", ""),
]


@pytest.mark.parametrize(("words", "sentence", "hint"), BAD, ids=lambda v: " ".join(v)[:40])
def test_what_means_nothing_is_refused_in_a_sentence(workshop, capfd, words, sentence, hint):
    code = main(["dump", "-o", "out", *words])
    err = capfd.readouterr().err
    assert code == 2
    assert sentence in err and hint in err
    assert "Traceback" not in err
    assert not (workshop / "out").exists()


def test_an_output_that_is_there_is_replaced_only_when_asked_and_only_if_a_run(dump, workshop):
    (workshop / "out").mkdir()
    (workshop / "out" / "thesis.txt").write_text("years of work")
    for options in ([], ["--force"]):
        dumped = dump(*options, argv=["true"])
        assert dumped.code == 2 and "out" in dumped.err
    assert (workshop / "out" / "thesis.txt").read_text() == "years of work"


def test_without_an_output_the_folder_is_named_after_the_time(workshop, capfd, warm_python):
    assert main(["dump", "--", warm_python, "infer.py"]) == 0, capfd.readouterr().err
    [made] = workshop.glob("driftline_*")
    assert (made / "run.json").exists()


def test_the_line_to_type_next_can_be_copied(workshop, capfd, warm_python):
    words = ["dump", "-o", "my run", "--", warm_python, "infer.py"]
    assert main(words) == 0
    assert "next: driftline compare 'my run' CANDIDATE" in capfd.readouterr().err
