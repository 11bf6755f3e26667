"""The error watch inside a process: planted faults are named, deliberate infinities are not."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from driftline import open_run
from driftline.captures.errcheck.findings import Finding, read_findings
from driftline.captures.torch.errcheck.api import ErrorWatch, watch_errors
from driftline.errors import BadInput

INF = float("inf")


@pytest.fixture
def watch(tmp_path: Path):
    def watch(types: str | list[str] = "overflow", **options) -> ErrorWatch:
        return watch_errors(tmp_path / "found", types=types, **options)

    return watch


def only(watch: ErrorWatch) -> Finding:
    (finding,) = watch.findings
    return finding


def clean(watch: ErrorWatch, tmp_path: Path) -> bool:
    return watch.findings == [] and not (tmp_path / "found").exists()


class TestProducers:
    def test_the_logarithm_of_a_negative_number_is_named_with_its_line(self, watch) -> None:
        with watch() as w:
            x = torch.tensor([1.0, -1.0])
            y = torch.log(x)  # the line
            (y * 2).sum()
        found = only(w)
        assert (found.types, found.operator, found.cause) == (("nan",), "aten.log.default", "made")
        assert found.code.startswith("y = torch.log(x)") and __file__ in found.line
        assert found.outputs[0].nan == 1 and found.outputs[0].elements == 2
        assert w.reporter.propagators == 2

    def test_nothing_after_the_first_is_listed_and_a_second_source_is(self, watch) -> None:
        with watch() as w:
            a = torch.zeros(3) / 0
            b = a + 1
            c = torch.full((3,), 1e38) * 1e38
            (b + c).mean()
        assert [f.operator for f in w.findings] == ["aten.div.Tensor", "aten.mul.Tensor"]
        assert [f.types for f in w.findings] == [("nan",), ("inf",)]
        assert w.reporter.propagators == 3

    def test_a_module_is_named_and_its_step_and_visit(self, watch) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

            def forward(self, x: torch.Tensor, bad: bool) -> torch.Tensor:
                h = self.inner(x)
                h = self.inner[1](h * (INF if False else 1))
                return h / 0 if bad else h

        net = Net()
        with torch.no_grad(), watch() as w:
            net(torch.ones(1, 2), False)
            net(torch.ones(1, 2), True)
        found = only(w)
        assert found.module == "(root)" and found.site == "(root)/aten.div"
        assert found.step == 1

    def test_zero_by_zero_in_a_backward_pass_names_the_forward_line(self, watch) -> None:
        x = torch.zeros(3, requires_grad=True)
        with watch() as w:
            y = x * 1
            z = y.sqrt()  # its gradient is 0 / 0
            n = (z * 0).sum()
            n.backward()
        found = only(w)
        assert (found.types, found.phase) == (("nan",), "backward")
        assert "its gradient is 0 / 0" in found.forward_line
        assert found.code == "n.backward()"

    def test_in_place_and_out_variants_are_seen(self, watch) -> None:
        with watch() as w:
            a = torch.zeros(4)
            a.div_(0)
            out = torch.empty(4)
            torch.log(torch.full((4,), -1.0), out=out)
            b = torch.ones(4)
            b[1:3].mul_(INF).sub_(INF)
        operators = [f.operator for f in w.findings]
        assert operators[0].startswith("aten.div_") and operators[1] == "aten.log.out"
        assert any(name.startswith("aten.sub_") for name in operators)
        assert w.findings[0].inputs[0].nan == 0  # what it read, not what it left

    def test_several_outputs_sparse_and_complex_tensors_are_read(self, watch) -> None:
        with watch("nan") as w:
            torch._foreach_div([torch.zeros(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)])
            s = torch.sparse_coo_tensor([[0, 1]], [0.0, 1.0], (3,), check_invariants=True)
            s / 0.0
            torch.view_as_complex(torch.zeros(2, 2)) / 0
        names = [f.operator for f in w.findings]
        assert any("_foreach_div" in name for name in names)
        assert len(names) >= 3

    def test_empty_tensors_and_integers_are_no_matter(self, watch, tmp_path: Path) -> None:
        with watch("all") as w:
            torch.zeros(0) / 0
            torch.arange(4) // 2
            torch.zeros(0, 3).sum(1)
        assert clean(w, tmp_path)

    def test_a_nan_that_came_with_the_weights_is_said_to_have_come_in(self, watch) -> None:
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight[0, 0] = math.nan
        with torch.no_grad(), watch() as w:
            layer(torch.ones(1, 2))
            layer(torch.ones(1, 2))
        found = only(w)
        assert found.cause == "entered" and found.types == ("nan",)
        assert "came in with" in found.sentence()

    def test_a_parameter_of_one_element_is_no_constant(self, watch) -> None:
        scale = nn.Parameter(torch.tensor(math.nan))
        with watch() as w:
            torch.ones(3) * scale
        assert only(w).cause == "entered"

    def test_one_thread_beside_another_is_watched(self, watch) -> None:
        net = nn.Sequential(nn.Linear(2, 2))

        def run() -> None:
            net(torch.full((1, 2), 1e38)) * 1e38

        with torch.no_grad(), watch() as w:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert w.findings

    def test_an_unknown_type_or_level_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="overflw"):
            watch_errors(tmp_path, types="overflw")
        with pytest.raises(BadInput, match="level"):
            watch_errors(tmp_path, level="kernel")  # type: ignore[arg-type]


class TestDeliberate:
    def test_masks_of_every_make_do_not_alarm(self, watch, tmp_path: Path) -> None:
        scores = torch.randn(2, 4, 4)
        allowed = torch.ones(4, 4).tril().bool()
        with watch() as w:
            a = torch.full((4, 4), -INF).triu(1)
            b = torch.zeros(4, 4).masked_fill(~allowed, -INF)
            c = torch.where(allowed, scores, -INF)
            d = scores.clone()
            d[:, ~allowed] = -INF
            e = torch.zeros(4, 4).masked_fill_(~allowed, torch.tensor(-INF))
            f = torch.log(allowed.float())
            g = torch.nn.functional.pad(scores, (0, 1), value=-INF)
            h = torch.nn.Transformer.generate_square_subsequent_mask(4)
            for mask in (a, b, e, f, h):
                (scores + mask).softmax(-1)
            for full in (c, d, g):
                full.softmax(-1)
            torch.max(c, torch.tensor(-INF))
            torch.full((2,), math.nan)
            best = torch.tensor(INF)
            torch.minimum(best, torch.tensor(1.0))
            torch.topk(c, 2)
            torch.logsumexp(c, -1)
            lengths = torch.tensor([5]), torch.tensor([2])
            nn.functional.ctc_loss(torch.randn(5, 1, 4).log_softmax(2), torch.ones(1, 2), *lengths)
        assert clean(w, tmp_path)

    def test_the_lowest_value_of_a_format_may_fall_to_minus_infinity(
        self, watch, tmp_path: Path
    ) -> None:
        with watch() as w:
            mask = torch.full((3,), torch.finfo(torch.float16).min, dtype=torch.float16)
            ((mask + torch.tensor([-50.0, -100, 0]).half()).float()).softmax(-1)
            torch.full((3,), torch.finfo(torch.float32).min).half()
        assert clean(w, tmp_path)

    def test_the_logarithm_of_a_zero_that_is_nobodys_mask_alarms(self, watch) -> None:
        for values in (torch.zeros(20), torch.tensor([1.0, 0.0, 2.0]), torch.randn(64).relu()):
            with watch() as w:
                torch.log(values)
            assert only(w).types == ("inf",)

    def test_a_row_that_is_masked_altogether_alarms(self, watch) -> None:
        with watch() as w:
            torch.full((2, 4), -INF).softmax(-1)
        found = only(w)
        assert found.types == ("nan",) and "masked" in found.reason

    def test_a_mask_that_came_as_data_does_not_alarm(self, watch, tmp_path: Path) -> None:
        mask = torch.zeros(4, 4)
        mask[0, 1:] = -INF
        with watch() as w:
            (torch.randn(4, 4) + mask).softmax(-1)
        assert clean(w, tmp_path)

    def test_memory_nobody_wrote_does_not_alarm(self, watch, tmp_path: Path) -> None:
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        try:
            with watch("all") as w:
                cache = torch.empty(4, 4)
                cache[0] = torch.ones(4)
                cache.index_copy_(0, torch.tensor([1]), torch.ones(1, 4))
                cache[:2] @ torch.ones(4, 2)
                torch.cat([cache, cache])
                (cache * 2).sum()
                torch.empty(3).fill_(1).log()
                torch.empty_like(cache).copy_(torch.ones(4, 4))
        finally:
            torch.use_deterministic_algorithms(False)
        assert clean(w, tmp_path)
        assert w.reporter.unwritten and not w.reporter.propagators

    def test_memory_that_was_wholly_written_is_judged_again(self, watch) -> None:
        with watch() as w:
            room = torch.empty(4)
            room.copy_(torch.zeros(4))
            room.div_(room)
        assert only(w).operator.startswith("aten.div_")

    def test_what_is_allowed_does_not_alarm_nor_what_follows(self, watch, tmp_path: Path) -> None:
        with watch(allow="aten.log") as w:
            torch.log(torch.zeros(3)) + 1
        assert clean(w, tmp_path)
        with watch(allow="(program)/aten.reciprocal") as w:
            torch.reciprocal(torch.zeros(3))
            torch.log(torch.zeros(3))
        assert only(w).operator == "aten.log.default"


class TestTypes:
    def test_only_what_is_wanted_is_found(self, watch) -> None:
        with watch("nan") as w:
            big = torch.full((2,), 1e38) * 1e38
            big - big
        assert only(w).operator == "aten.sub.Tensor"
        with watch("inf") as w:
            torch.zeros(2) / 0
            torch.ones(2) / 0
        assert only(w).types == ("inf",)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_fp8_values_that_are_cut_at_the_top_saturate(self, watch, dtype: torch.dtype) -> None:
        top = torch.finfo(dtype).max
        with watch("saturation") as w:
            x = torch.tensor([1.0, 2 * top])
            x.clamp(-top, top).to(dtype)
        found = only(w)
        assert found.types == ("saturation",) and f"{top:g}" in found.reason
        assert found.operator == "aten.clamp.default"

    def test_scaling_exactly_to_the_top_is_no_saturation(self, watch, tmp_path: Path) -> None:
        x = torch.randn(64)
        with watch("saturation") as w:
            scale = 448.0 / x.abs().max()
            (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        assert clean(w, tmp_path)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_sum_that_stops_at_the_formats_maximum_saturates(
        self, watch, dtype: torch.dtype
    ) -> None:
        top = torch.finfo(dtype).max
        with watch("saturation") as w:
            half = torch.full((2,), top / 2, dtype=dtype)
            half + half
            half.neg() * 2
        assert [f.types for f in w.findings] == [("saturation",), ("saturation",)]

    def test_masks_at_the_lowest_value_are_no_saturation(self, watch, tmp_path: Path) -> None:
        with watch("saturation") as w:
            mask = torch.full((3,), torch.finfo(torch.float16).min, dtype=torch.float16)
            mask + torch.ones(3).half()
            mask.clone()[:2]
        assert clean(w, tmp_path)

    def test_headroom_is_kept_per_site(self, watch) -> None:
        with watch("saturation") as w:
            torch.full((2,), 1024.0, dtype=torch.float16) * 32
        from driftline.captures.errcheck.findings import headroom_rows

        rows = {row[0]: row[3] for row in headroom_rows(w.reporter.peaks, {})}
        assert rows["(program)/aten.mul"] == pytest.approx(1.0, abs=0.01)

    def test_gradients_lost_to_zero_underflow(self, watch) -> None:
        with watch("underflow") as w:
            torch.full((100,), 1e-6).half() * 1e-3
        assert only(w).types == ("underflow",)

    def test_zeros_that_were_there_or_are_the_point_are_no_underflow(
        self, watch, tmp_path: Path
    ) -> None:
        with watch("underflow") as w:
            x = torch.randn(64).relu()
            x * 2
            x.half()
            torch.nn.functional.dropout(torch.randn(64), 0.5)
            torch.randn(64) * 0
            (torch.randn(8, 64) * 30).softmax(-1)
            torch.randn(64) * (torch.arange(64) % 2 == 0)
            torch.randn(64).to(torch.complex64)
            torch.div(torch.rand(64), 3.0, rounding_mode="floor")
        assert clean(w, tmp_path)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_a_device_counts_what_the_host_counts(self, dtype: torch.dtype) -> None:
        from driftline.captures.torch.errcheck.devices import count_small
        from driftline.captures.torch.errcheck.inspect import pattern_of, read

        tiny = torch.finfo(dtype).tiny
        x = torch.tensor(
            [0.0, -0.0, tiny / 2, -tiny / 2, tiny, -tiny, 1.0, INF, -INF, INF - INF], dtype=dtype
        )
        pattern = pattern_of(dtype)
        assert pattern is not None
        cell = torch.empty((), dtype=torch.int64)
        count_small(x.view(2, 5).T, pattern, cell)
        there = read(x, pattern)
        assert cell.item() == there.zero + there.subnormal == 4

    def test_repeats_of_a_saturating_site_are_counted(self, watch) -> None:
        with watch("saturation") as w:
            half = torch.full((2,), 65504 / 2, dtype=torch.float16)
            for _ in range(5):
                half + half
        assert len(w.findings) == 1 and w.reporter.repeats == 4


class TestWhatIsLeft:
    def test_findings_are_on_disk_at_once_with_their_inputs(self, watch, tmp_path: Path) -> None:
        with watch() as w:
            x = torch.tensor([[1.0, -2.0]])
            torch.log(x)
            on_disk = read_findings(tmp_path / "found")
            assert [f.operator for f in on_disk] == ["aten.log.default"]
            run = open_run(tmp_path / "found")
            assert run.get("(program)/aten.log", "input").numpy().tolist() == x.tolist()
        assert on_disk == w.findings
        text = next((tmp_path / "found").glob("ait_overflow_res_*.txt")).read_text()
        assert text == "Overflow detected! Operator name: (program)/aten.log\n"

    def test_what_an_in_place_operator_overwrote_is_kept(self, watch, tmp_path: Path) -> None:
        with watch():
            torch.tensor([4.0, -9.0]).sqrt_()
        run = open_run(tmp_path / "found")
        assert run.get("(program)/aten.sqrt_", "input").numpy().tolist() == [4.0, -9.0]

    def test_tensors_beyond_the_limit_are_listed_without_values(self, watch, tmp_path) -> None:
        with watch(max_bytes=16):
            torch.log(-torch.ones(1000))
        record = next(r for r in open_run(tmp_path / "found").records if r.key.port == "input")
        assert record.blob is None and record.lost

    def test_results_are_bitwise_what_they_are_without(self, watch) -> None:
        def train(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                loss = net(torch.randn(5, 8)).log_softmax(-1).mean()
                loss.backward()
                optimizer.step()
            return [p.detach().clone() for p in net.parameters()]

        plain = train(0)
        for level in ("operator", "module"):
            with watch("all", level=level):
                watched = train(0)
            assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))

    def test_inference_mode_and_views_are_no_trouble(self, watch) -> None:
        with torch.inference_mode(), watch() as w:
            x = torch.ones(4, 4).t()[1:].reshape(-1).sub_(1)
            (x / x).view(3, 4).t() + 1
        found = only(w)
        assert found.operator == "aten.div.Tensor" and w.reporter.propagators == 1


class TestWhatWasWrittenOnPurpose:
    @pytest.mark.parametrize(("value", "kind"), [("nan", "nan"), ("inf", "inf"), ("-inf", "inf")])
    def test_one_bad_weight_is_found_where_it_spreads(self, watch, value: str, kind: str) -> None:
        model = nn.Linear(4, 4)
        with watch() as w, torch.no_grad():
            model.weight.view(-1)[3] = float(value)
            model(torch.ones(2, 4))
        found = only(w)
        assert found.operator == "aten.addmm.default" and found.types == (kind,)
        assert "the program wrote there itself" in found.sentence()

    def test_a_nan_that_marks_what_is_not_there_may_stand(self, watch, tmp_path: Path) -> None:
        with watch() as w:
            x = torch.full((4, 4), float("nan"))
            x[:2] = 1.0
            y = (x * 2).clone().T.contiguous()
            y.nansum() + y.isnan().sum() + torch.nan_to_num(y).mean()
        assert clean(w, tmp_path)

    def test_a_mask_added_to_a_product_may_be_infinite(self, watch, tmp_path: Path) -> None:
        with watch() as w:
            mask = torch.full((1, 3, 3), -INF).triu(1)
            torch.baddbmm(mask, torch.ones(1, 3, 2), torch.ones(1, 2, 3)).softmax(-1)
        assert clean(w, tmp_path)

    def test_what_is_allowed_may_spread(self, watch, tmp_path: Path) -> None:
        with watch(allow=["aten.log"]) as w, torch.no_grad():
            nn.Linear(3, 3)(torch.log(torch.full((2, 3), -1.0))).softmax(-1)
        assert clean(w, tmp_path)
