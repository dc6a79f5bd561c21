"""`tune`: right configurations only, the fastest one's rule, a table that the library reads, and a second run that goes on."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from grouped_lora_ops import __main__ as entry
from grouped_lora_ops import launch, ops, reference, timing, tune
from grouped_lora_ops._progress import Progress
from grouped_lora_ops.ops import common
from grouped_lora_ops.tune import candidates, grid
from grouped_lora_ops.tune.grid import Point

POINTS = grid.points(["G4-r64-S8-"])


class FakeDevice:
    """A GPU on which block_m 32 and block_n 64 are fast, 2 warps compute nonsense quickly, and 8 warps do not launch."""

    name, arch, sms, has_cuda = "NVIDIA L40S", "sm_89", 142, False

    def __init__(self, stop_after: int | None = None, slow: tuple[str, ...] = ()):
        self.opened, self.stop_after, self.slow, self.closed = [], stop_after, slow, 0

    def open(self, point):
        if self.stop_after is not None and len(self.opened) == self.stop_after:
            raise KeyboardInterrupt
        self.opened.append(point.name)
        self.point = point

    def close(self):
        self.closed += 1

    def parts(self, config):
        return [part for part in (config.fused, config.shrink, config.expand) if part is not None]

    def wrong(self, config):
        if self.closed_form(config):
            return None
        if any(part.num_warps == 8 for part in self.parts(config)):
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        return "not exact on small integers" if any(part.num_warps == 2 for part in self.parts(config)) else None

    def closed_form(self, config):
        return config == candidates.closed_form(self.point.problem(self.arch, self.sms))

    def us(self, config):
        assert self.wrong(config) is None, "a wrong configuration was timed"
        if self.closed_form(config):
            return 100.0
        if self.point.name in self.slow:
            return 98.0
        if config.fused is not None:
            return 90.0
        us = (
            40.0
            + abs(config.shrink.block_m - 32)
            + abs(config.expand.block_n - 64) / 4
            + config.expand.loop
            + config.shrink.num_stages / 10
        )
        return us + config.shrink.block_k / 1000

    def precompile(self, points, workers, done):
        self.compiled = [point.name for point in points]
        for _ in points:
            done(1)


def every_rule(p, cuda: bool = True) -> dict:
    """All two-launch rules with the first shrink or the first expand, and those of one launch."""
    return candidates.one_launch(p, cuda) | candidates.rules(p) | candidates.rules(p, candidates.shrinks(p)[0])


def tuned(tmp_path, device=None, points=POINTS, workers=0):
    device = device or FakeDevice()
    return tune.tune(points, device, tmp_path / "sm_89.json", workers), device


@pytest.fixture
def with_table(tmp_path, monkeypatch):
    """launch.delta reads tmp_path/sm_89.json."""
    monkeypatch.setenv("GROUPED_LORA_TABLE", str(tmp_path / "sm_89.json"))
    launch.table.cache_clear()
    yield
    launch.table.cache_clear()


def test_the_table_gives_the_fastest_configuration_that_is_right(tmp_path, with_table):
    table, device = tuned(tmp_path)
    assert len(table["delta"]) == len(POINTS) and device.closed
    _, *lines = [json.loads(text) for text in (tmp_path / "sm_89.json.journal").read_text().splitlines()]
    for point, line in zip(POINTS, lines, strict=True):
        p = point.problem("sm_89", 142)
        config = launch.delta(p)
        assert config != candidates.closed_form(p)
        device.point = point
        assert device.wrong(config) is None and device.us(config) == pytest.approx(line["us"], abs=1e-3)
        others = [us_or_none(device, candidates.config_of(rule, p)) for rule in every_rule(p, cuda=False).values()]
        assert all(us is None or us >= line["us"] - 1e-3 for us in others)


def us_or_none(device, config):
    try:
        return None if device.wrong(config) else device.us(config)
    except RuntimeError:
        return None


def test_what_is_wrong_or_does_not_launch_is_named_and_never_chosen(tmp_path, capsys):
    tuned(tmp_path, points=grid.points(["G4-r64-S8-T8-"]))
    assert "not exact on small integers, not timed" in capsys.readouterr().out
    (_, line) = [json.loads(text) for text in (tmp_path / "sm_89.json.journal").read_text().splitlines()]
    assert {"not exact on small integers", "RuntimeError: out of resource: shared memory"} == set(
        line["dropped"].values()
    )
    assert line["rule"]["shrink"]["num_warps"] == 4 and line["rule"]["expand"]["num_warps"] not in (2, 8)


def test_a_gain_within_the_noise_makes_no_rule(tmp_path):
    table, _ = tuned(tmp_path, FakeDevice(slow=("G4-r64-S8-T64",)))
    tokens = [rule["when"]["tokens"] for rule in table["delta"]]
    assert len(tokens) == len(POINTS) - 1 and [23, 128] not in tokens


def test_a_closed_form_timed_on_a_cold_gpu_gives_no_rule(tmp_path):
    """Measured: 123.5 µs the first time, 115 in every other run, and its own kernels became a rule "8 % faster"."""

    class Cold(FakeDevice):
        def open(self, point):
            super().open(point)
            self.cold = True

        def us(self, config):
            us, self.cold = super().us(config) + 30 * self.cold, False
            return us

    table, _ = tuned(tmp_path, Cold(slow=tuple(point.name for point in POINTS)))
    assert table["delta"] == []
    table, _ = tuned(tmp_path / "fast", Cold())
    assert len(table["delta"]) == len(POINTS)


def test_a_configuration_that_fails_when_it_is_timed_again_drops_out(tmp_path):
    """It ran once. The next one takes its place, and the points behind are measured."""

    class Failing(FakeDevice):
        def open(self, point):
            super().open(point)
            self.times = {}

        def us(self, config):
            us, key = super().us(config), str(config)
            self.times[key] = self.times.get(key, 0) + 1
            if self.times[key] == 2 and not self.closed_form(config) and len(self.failed) < len(self.opened):
                self.failed.append(us)
                raise torch.OutOfMemoryError("out of memory")
            return us

    device = Failing()
    device.failed = []
    table, _ = tuned(tmp_path, device)
    assert len(table["delta"]) == len(POINTS) == len(device.failed)
    _, *lines = [json.loads(text) for text in (tmp_path / "sm_89.json.journal").read_text().splitlines()]
    for failed, line in zip(device.failed, lines, strict=True):
        assert failed <= line["us"] < 100 and "OutOfMemoryError: out of memory" in line["dropped"].values()
        assert line["label"] not in line["dropped"]


def test_the_closed_forms_own_shrink_is_tried_with_every_expand(tmp_path):
    """Here one of the rules is the closed form, and another expand behind its shrink is what is fast."""
    (point,) = grid.points(["G4-r64-S8-T1024-"])
    p = point.problem("sm_89", 142)
    default = candidates.closed_form(p)
    assert default in [candidates.config_of(rule, p) for rule in candidates.rules(p).values()]

    class Own(FakeDevice):
        def us(self, config):
            us = super().us(config)
            if config == default:
                return 60.0
            return us - 30 if config.shrink == default.shrink and config.fused is None else us + 30

    table, _ = tuned(tmp_path, Own(), [point])
    (rule,) = table["delta"]
    assert candidates.config_of(rule, p).shrink == default.shrink
    slow, _ = tuned(tmp_path / "slow", Own(slow=(point.name,)), [point])
    assert slow["delta"] == [], "the closed form is no rule of its own"


def test_a_second_run_measures_only_what_is_missing(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, FakeDevice(stop_after=2))
    names = [point.name for point in POINTS]
    assert len(json.loads((tmp_path / "sm_89.json").read_text())["delta"]) == 2  # what there is, is usable
    journal = tmp_path / "sm_89.json.journal"
    whole = journal.read_text()
    journal.write_text(whole + '{"point": "G4-r64-S8-T64", "us": 1')  # killed while writing
    table, device = tuned(tmp_path)
    assert device.opened == names[2:] and "2 of 6 points are in sm_89.json.journal" in capsys.readouterr().out
    fresh, _ = tuned(tmp_path / "other")
    assert table == fresh
    again, device = tuned(tmp_path, workers=2)
    assert device.opened == [] and again == fresh and not hasattr(device, "compiled")


def test_only_what_is_missing_is_compiled_ahead(tmp_path):
    tuned(tmp_path, points=POINTS[:2])
    _, device = tuned(tmp_path, workers=2)
    assert device.compiled == [point.name for point in POINTS[2:]]


def test_a_journal_of_other_versions_is_refused(tmp_path):
    _, device = tuned(tmp_path)
    device = FakeDevice()
    device.name = "NVIDIA L4"
    with pytest.raises(
        ValueError, match=r"sm_89\.json\.journal was measured with gpu NVIDIA L40S; delete it, or name another --out\."
    ):
        tuned(tmp_path, device)


def test_a_point_that_does_not_fit_into_memory_is_left_out_and_comes_again(tmp_path, capsys):
    class Small(FakeDevice):
        def open(self, point):
            if point.tokens == 8192:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().open(point)

    table, _ = tuned(tmp_path, Small())
    assert (
        len(table["delta"]) == 5
        and "G4-r64-S8-T8192: more memory than this GPU has free, left out" in capsys.readouterr().out
    )
    table, device = tuned(tmp_path)
    assert len(table["delta"]) == 6 and device.opened == ["G4-r64-S8-T8192"]


@pytest.mark.parametrize("installed", [True, False])
def test_lines_pass_above_the_bar_which_is_there_with_tqdm_on_a_terminal(installed, monkeypatch, capsys):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(3, "point") as bar:
        bar.what("G4-r64")
        bar.say("a line")
        bar.add(2)
    said = capsys.readouterr()
    assert "a line\n" in said.out and ("G4-r64" in said.err and "2/3" in said.err) == installed


def test_a_closed_form_that_is_wrong_stops_it(tmp_path):
    device = FakeDevice()
    device.wrong = lambda config: "not exact on small integers"
    with pytest.raises(
        tune.WrongKernel, match="the closed form's own kernels are not exact on small integers; run the doctor"
    ):
        tuned(tmp_path, device)


# --- the grid and its rules ---


def test_points_stand_for_ranges_that_cover_everything_once():
    for name in ("tokens", "slots", "groups", "rank"):
        ranges = sorted({tuple(point.when[name]) for point in grid.points()})
        if name != "rank":
            assert ranges[0][0] == 1 and ranges[-1][1] == grid.END
            assert all(high + 1 == low for (_, high), (low, _) in zip(ranges, ranges[1:]))
    for point in grid.points():
        p = point.problem("sm_89", 142)
        matching = [other.name for other in grid.points() if launch._matches(other.when, p)]
        assert matching == [point.name]


def test_a_rule_never_crosses_where_rows_are_found_in_another_way():
    """At SCAN_TOKENS rows start to come from a plan; with one slot, or one token, nothing is sorted."""
    for point in grid.points():
        low, high = point.when["tokens"]
        assert not low <= launch.SCAN_TOKENS < high
        assert (point.when["slots"][0] == 1) == (point.when["slots"] == [1, 1])


def test_a_rule_of_the_largest_rank_block_is_never_the_one_launch_kernel():
    """It holds one block of ranks, and larger ranks have the same block."""
    rule = {"fused": {"block_m": 64}}
    result = {"rule": rule, "us": 1.0, "default_us": 9.0}
    assert grid.rule_of(Point(8192, 4, 128, 8), result) is None
    assert grid.rule_of(Point(8192, 4, 64, 8), result)["fused"] == {"block_m": 64}
    for rank in range(1, 600):
        p = launch.Problem("sm_89", 142, 2, 8192, 4, 4096, 1024, rank, 8, True)
        made = grid.rule_of(Point(8192, 4, 64, 8), result)
        assert not launch._matches(made["when"], p) or rank <= launch.rank_block(64, 2)


def test_a_sum_cut_over_d_ends_where_its_scratch_would_be_large():
    result = {"rule": {"split": True, "shrink": {}, "expand": {}}, "us": 1.0, "default_us": 9.0}
    assert grid.rule_of(Point(8192, 4, 64, 8), result)["when"]["tokens"] == [2897, 16384]
    assert grid.rule_of(Point(64, 4, 64, 8), result)["when"]["tokens"] == [23, 128]


def test_every_candidate_leaves_a_rows_bits_alone():
    for point in grid.points():
        for arch, sms in (("sm_80", 108), ("sm_89", 142), ("sm_120", 188)):
            p = point.problem(arch, sms)
            for rule in every_rule(p).values():
                config = candidates.config_of(rule, p)
                for part in (config.fused, config.shrink):
                    if part is not None:
                        assert (part.chunk, part.chunks) == (
                            launch.chunk_of(4096),
                            launch.chunks_of(4096),
                        ) and part.chunk % part.block_k == 0
                for part in (config.fused, config.expand):
                    assert part is None or part.rank_block == launch.rank_block(p.rank, 2)


def test_a_rule_is_json_and_comes_back_the_same():
    for point in grid.points(["S8-"]):
        p = point.problem("sm_100", 148)
        for rule in every_rule(p).values():
            assert candidates.config_of(json.loads(json.dumps(rule)), p) == candidates.config_of(rule, p)


def test_the_librarys_own_choice_and_table_are_back_afterwards():
    before = launch.delta, launch.table
    p = POINTS[0].problem("sm_89", 142)
    candidates.use(candidates.config_of({"split": True, "shrink": {"block_m": 64}, "expand": {}}, p))
    assert launch.delta(p).shrink.block_m == 64 and common.configured(launch.delta, p).shrink.block_m == 64
    candidates.use(None)
    assert (launch.delta, launch.table) == before


# --- the kernels behind the candidates, and the device ---


@pytest.mark.parametrize("tokens, step", [(8, 3), (140, 8)])
def test_candidates_are_exact_in_the_interpreter(tokens, step, kernels):
    """Some of those for few rows and some of those for many."""
    pytest.importorskip("triton")
    p = launch.Problem("sm_89", 142, 2, tokens, 1, 140, 70, 20, 2)
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).bfloat16().to(kernels.device)

    x, a, b, out = integers(tokens, 140), integers(2, 20, 140), integers(2, 70, 20), integers(tokens, 70)
    ids, scalings = (
        (torch.arange(tokens) % 3 - 1).int().to(kernels.device),
        torch.tensor([0.5, 2.0], device=kernels.device),
    )
    right = out.clone()
    reference.delta_(right, x, a, b, ids, scalings)
    chosen = list((candidates.rules(p) | candidates.rules(p, candidates.shrinks(p)[0])).items())[::step]
    assert len(chosen) >= 3
    try:
        for label, rule in chosen:
            candidates.use(candidates.config_of(rule, p))
            got = out.clone()
            kernels.delta_(got, x, a, b, ids, scalings, None, None, None)
            assert torch.equal(got, right), label
    finally:
        candidates.use(None)


def test_a_table_cannot_send_more_ranks_than_a_block_to_the_one_launch_kernel():
    """It holds h in one block of ranks, and would leave the others out."""
    rule = {"fused": {"block_m": 16}}
    for rank in (16, 128, 129, 256, 600):
        for itemsize in (2, 4):
            p = launch.Problem("sm_89", 142, itemsize, 2048, 1, 4096, 4096, rank, 1)
            fits = rank <= launch.rank_block(rank, itemsize)
            config = candidates.config_of(rule, p)
            assert (config.fused is not None) == fits and (fits or config == candidates.closed_form(p))


@pytest.fixture
def device(monkeypatch):
    """tune's Device on the CPU, with small sizes: the ops run their references, whatever configuration is in use."""
    module = importlib.import_module("grouped_lora_ops.tune.device")
    monkeypatch.setattr(module, "FEATURES", 64)
    monkeypatch.setattr(grid, "FEATURES", 64)
    made = module.Device.__new__(module.Device)
    made.device, made.arch, made.sms, made.name, made.has_cuda = torch.device("cpu"), "sm_89", 142, "CPU", False
    made.timer = timing.WallTimer(made.device)
    return made


@pytest.mark.parametrize("name", ["G4-r16-S8-T8-", "G1-r32-S1-T1-", "G1-r16-S8-T256-"])
def test_the_device_tells_right_from_wrong(name, device, monkeypatch):
    (point,) = grid.points([name])
    config = candidates.closed_form(point.problem("sm_89", 142))
    device.open(point)
    assert device.wrong(config) is None and device.us(config) > 0
    right = ops.delta_

    def wrong_bits(out, x, *args, **kwargs):
        right(out, x, *args, **kwargs)
        if x is not device.exact["x"]:
            out.view(-1)[3] += 0.5

    def wrong_numbers(out, *args, **kwargs):
        right(out, *args, **kwargs)
        out.view(-1)[3] += 64

    monkeypatch.setattr(ops, "delta_", wrong_bits)
    assert device.wrong(config) == "of other bits than the closed form's"
    monkeypatch.setattr(ops, "delta_", wrong_numbers)
    assert device.wrong(config) == "not exact on small integers"
    device.close()


@pytest.mark.gpu
def test_a_point_is_measured_on_this_gpu(tmp_path):
    module = importlib.import_module("grouped_lora_ops.tune.device")
    points = grid.points(["G1-r16-S1-T8-"])
    table = tune.tune(points, module.Device(torch.cuda.current_device()), tmp_path / "table.json")
    assert table["measured"]["gpu"] == torch.cuda.get_device_name()
    (_, line) = [json.loads(text) for text in (tmp_path / "table.json.journal").read_text().splitlines()]
    assert line["default_us"] > 0 and line["tried"] > 5


# --- the command ---


def test_the_list_needs_no_gpu(capsys):
    assert entry.main(["tune", "--list", "-k", "G4-r16-S8-", "-k", "G1-r64-S1-T8-"]) == 0
    assert capsys.readouterr().out.split() == [*(f"G4-r16-S8-T{t}" for t in grid.TOKENS), "G1-r64-S1-T8"]


def test_an_unknown_point_is_an_error(capsys):
    assert entry.main(["tune", "-k", "nothing"]) == 2 and "--list prints them" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_fails(capsys):
    assert entry.main(["tune"]) == 1 and "there is no NVIDIA GPU that torch can use here" in capsys.readouterr().err


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run the command in tmp_path on a fake GPU."""

    def run(device, *options):
        monkeypatch.setattr(importlib.import_module("grouped_lora_ops.tune.device"), "Device", lambda index: device)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.chdir(tmp_path)
        return entry.main(["tune", "-k", "G4-r64-S8-", "--workers", "0", *options])

    return run


def test_the_command_writes_a_table_that_is_read(tmp_path, command, capsys):
    assert command(FakeDevice()) == 0
    assert "6 rules in sm_89.json" in capsys.readouterr().out and (tmp_path / "sm_89.json").is_file()
    assert command(FakeDevice(), "--out", "tables/mine.json") == 0 and (tmp_path / "tables" / "mine.json").is_file()


def test_an_interrupted_command_says_how_to_go_on(command, capsys):
    assert command(FakeDevice(stop_after=1)) == 130
    assert "the same command goes on from sm_89.json.journal" in capsys.readouterr().err
    assert command(FakeDevice()) == 0


def test_wrong_kernels_end_the_command_with_the_reason(command, capsys):
    device = FakeDevice()
    device.wrong = lambda config: "not exact on small integers"
    assert command(device) == 1 and "run the doctor" in capsys.readouterr().err


def test_a_table_that_the_library_cannot_read_is_not_passed_off_as_one(tmp_path):
    path = tmp_path / "table.json"
    grid.write(path, {"measured": {}, "delta": [{"when": {}, "split": False, "shrink": {"chunk": 256}, "expand": {}}]})
    with pytest.raises(ValueError, match="must not change"):
        tune.check(path, "sm_89", 142)
