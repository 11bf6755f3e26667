"""`compare --shard` and `merge`: the table of one process from parts.

Anything else is refused, in the words that docs/scale.md shows.
"""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_runs import Here, write_run, written

import driftline
from driftline.comparison.table.part import Part, part_name
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.execution.slicing import Shard


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    write_run(place / "ref", 0.0, ranks=2, layers=5)
    write_run(place / "cand", 1e-3, ranks=2, layers=5)
    write_run(place / "other", 2e-3, ranks=2, layers=5)
    return place


def parts(two, of, candidate="cand", **words):
    return [
        driftline.compare_shard(two / "ref", two / candidate, f"{number}/{of}", **words)
        for number in range(1, of + 1)
    ]


def stored(made, place):
    for part in made:
        part.write(place)
    return place


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    of=st.integers(1, 14),
    words=st.sampled_from(
        [
            {},
            {"rtol": 1e-3},
            {"metrics": ["kl"], "limits": {"kl": 0.5, "cosine": 0.9}},
            {"min_coverage": 1.0},
            {"sites": ["layers.*", "square"], "jobs": 1},
        ]
    ),
    shuffled=st.randoms(),
)
def test_however_many_shards_the_merged_table_is_that_of_one_process(
    two, tmp_path, of, words, shuffled
):
    one = driftline.compare(two / "ref", two / "cand", **words)
    made = parts(two, of, **words)
    shuffled.shuffle(made)
    place = stored(made, tmp_path / f"parts{len(list(tmp_path.iterdir()))}")
    merged = driftline.merge(place)
    assert written(merged, tmp_path / "merged") == written(one, tmp_path / "one")
    assert str(merged) == str(one)


def test_shards_may_be_shared_out_in_turn(two, tmp_path):
    one = driftline.compare(two / "ref", two / "cand")
    merged = driftline.merge(parts(two, 3, executor=Here(elsewhere=True)))
    assert written(merged, tmp_path / "merged") == written(one, tmp_path / "one")


def test_limits_of_layers_go_with_the_parts(two, tmp_path):
    clean = driftline.compare(two / "ref", two / "cand")
    limits = driftline.calibrate([clean], metrics=["relative_l2"], sites=["layers.*"])
    one = driftline.compare(two / "ref", two / "other", thresholds=limits)
    merged = driftline.merge(parts(two, 2, "other", thresholds=limits))
    assert written(merged, tmp_path / "merged") == written(one, tmp_path / "one")
    assert "thresholds" in merged.limits


def test_missing_shards_are_named(two, tmp_path):
    place = stored(parts(two, 8), tmp_path)
    (place / "shard-3-of-8.json").unlink()
    with pytest.raises(BadInput, match=r"^shard 3/8 is missing"):
        driftline.merge(place)
    (place / "shard-7-of-8.json").unlink()
    with pytest.raises(BadInput, match=r"^shards 3/8 and 7/8 are missing"):
        driftline.merge(place)
    (place / "shard-1-of-8.json").unlink()
    with pytest.raises(BadInput, match=r"^shards 1/8, 3/8 and 7/8 are missing"):
        driftline.merge(place)


def test_a_shard_that_is_there_twice_is_named(two, tmp_path):
    place = stored(parts(two, 2), tmp_path / "a")
    again = stored(parts(two, 2)[:1], tmp_path / "b")
    with pytest.raises(BadInput, match=r"shard 1/2 is there twice: .*a/shard-1.* and .*b/shard-1"):
        driftline.merge([place, again])
    assert len(driftline.merge([place, place / "shard-1-of-2.json"]).rows) > 1  # one file once


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"limits": {"cosine": 0.5}}, "different limits"),
        ({"metrics": ["kl"]}, "different metrics"),
        ({"sites": ["layers.*"]}, "compare different tensors"),
        ({"candidate": "other"}, "their candidates are different runs, .*cand and .*other"),
    ],
)
def test_parts_of_different_comparisons_are_refused(two, words, said):
    with pytest.raises(BadInput, match=f"are not of one comparison: .*{said}"):
        driftline.merge([parts(two, 2)[0], parts(two, 2, **words)[1]])


def test_parts_that_compare_as_many_other_tensors_are_refused(two):
    first, second = (parts(two, 2, sites=[f"layers.{layer}"])[layer] for layer in (0, 1))
    assert first.pairs == second.pairs > 0
    with pytest.raises(BadInput, match="they compare different tensors"):
        driftline.merge([first, second])


def test_parts_of_other_versions_and_counts_are_refused(two, tmp_path):
    first, second = parts(two, 2)
    shown = second.as_json()
    shown["made"] = {**shown["made"], "driftline": "9.9"}
    with pytest.raises(BadInput, match=r"by Driftline .*, the other by 9\.9"):
        driftline.merge([first, Part.from_json(shown, "second")])
    with pytest.raises(BadInput, match="one is of 2 shards, the other of 3"):
        driftline.merge([first, parts(two, 3)[1]])


@pytest.mark.parametrize(
    "harm",
    [
        lambda shown: shown.pop("rows"),
        lambda shown: shown.update(schema="driftline.part/9"),
        lambda shown: shown.update(shard=7),
        lambda shown: shown.update(places=[[0, 10**15]]),
        lambda shown: shown["rows"][0].update(status="fine"),
        lambda shown: shown["rows"].pop(),
        lambda shown: shown.update(tolerance={"limits": 3}),
        lambda shown: shown.update(places=[[0, len(shown["rows"])]]),
        lambda shown: shown.update(pairs=10**6),
    ],
)
def test_a_damaged_part_is_refused(two, tmp_path, harm):
    place = stored(parts(two, 2), tmp_path)
    for file in (place / "shard-2-of-2.json", place / "shard-1-of-2.json"):
        shown = json.loads(file.read_text())
        harm(shown)
        file.write_text(json.dumps(shown))
    with pytest.raises((BadFile, BadInput)):
        driftline.merge(place)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}'])
def test_what_is_no_part_is_refused(tmp_path, content):
    (tmp_path / "shard-1-of-1.json").write_text(content)
    with pytest.raises(BadFile, match="no part of a comparison"):
        driftline.merge(tmp_path)


def test_a_part_is_not_overwritten(two, tmp_path):
    (part,) = parts(two, 1)
    part.write(tmp_path)
    with pytest.raises(AlreadyThere, match=r"shard-1-of-1.json is there already"):
        part.write(tmp_path)
    part.write(tmp_path, force=True)


def test_names_of_parts_sort_by_their_numbers():
    names = [part_name(Shard(number, 120)) for number in range(1, 121)]
    assert names == sorted(names)


def test_other_kernels_are_told_but_merged(two):
    from driftline.comparison.shards import remarks

    first, second = parts(two, 2)
    shown = second.as_json()
    shown["made"] = {**shown["made"], "kernel": "abacus"}
    other = Part.from_json(shown, "second")
    (said,) = remarks([first, other])
    assert "more than one path of the kernel" in said and "abacus" in said
    assert driftline.merge([first, other]).rows


def test_the_commands_say_what_one_process_says(two, tmp_path, capsys, monkeypatch):
    from driftline.cli.main import main

    monkeypatch.chdir(two)
    code = main(["compare", "ref", "cand", "-o", str(tmp_path / "one")])
    said = capsys.readouterr().out
    for number in (1, 2, 3):
        words = ["compare", "ref", "cand", "--shard", f"{number}/3", "-o", str(tmp_path / "p")]
        assert main(words) == 0
        told = capsys.readouterr()
        assert not told.out and f"shard {number}/3: " in told.err
    assert main(["merge", str(tmp_path / "p"), "-o", str(tmp_path / "merged")]) == code == 1
    assert capsys.readouterr().out == said
    for name in ("table.json", "rows.csv", "rows.parquet"):
        one, merged = (tmp_path / which / name for which in ("one", "merged"))
        assert merged.read_bytes() == one.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "1/2"], "--shard needs -o"),
        (["--shard", "3/2", "-o", "p"], "there is no shard 3/2"),
        (["--shard", "1/2", "-o", "p", "--csv", "x.csv"], "--csv is for the whole comparison"),
        (["--shard", "1/2", "-o", "p", "--all"], "--all is for the whole comparison"),
        (["--jobs", "0"], "--jobs 0 cannot do anything"),
        (["--executor", "slurm"], "there is no executor 'slurm'"),
    ],
)
def test_words_that_mean_nothing_are_refused(two, monkeypatch, capsys, words, said):
    from driftline.cli.main import main

    monkeypatch.chdir(two)
    assert main(["compare", "ref", "cand", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("p").exists()
