"""`report`: both kinds of result file, the README's tables, the page and its pictures, and the comparison with earlier figures."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import made_up_runs
import pytest

from grouped_lora_ops import __main__ as entry
from grouped_lora_ops.report import runs, tables
from grouped_lora_ops.report.compare import Change

ROOT = Path(__file__).resolve().parent.parent
H200 = "NVIDIA H200"


def row(name="wo_a-r16-S2-T8", us=4.2, op="delta", contender="ours", **more) -> dict:
    numbers = runs.NAME.match(name)
    facts = {
        "T": int(numbers["tokens"]),
        "rank": int(numbers["rank"] or 8),
        "slots": int(numbers["slots"] or 1),
        "active": 2,
    }
    made = {
        "op": op,
        "workload": name,
        "contender": contender,
        **facts,
        "us": us,
        "floor_us": 0.213,
        "pct_of_floor": round(21.3 / us, 1),
    }
    return made | {"bar_us": 3.745, "best_peer": "sglang best", "best_peer_us": 9.0} | more


def run(*rows, date="2026-11-30T10:00:00Z", commit="abc1234", gpu=H200, tiny=False, **more) -> dict:
    head = {"schema": 1, "suite": "delta", "date": date, "gpu": gpu, "versions": {"torch": "2.11.0"}, "commit": commit}
    return head | {"method": "by hand", "tiny": tiny, "rows": list(rows) or [row()]} | more


def write(path: Path, made: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return path


def report(*arguments) -> int:
    return entry.main(["report", *map(str, arguments)])


# --- files ---


def test_a_result_file_is_read_as_it_is(tmp_path):
    made = run()
    assert runs.read(write(tmp_path / "a.json", made)) == [made]


def of_pytest_benchmark(*made) -> dict:
    """The file that pytest-benchmark writes for the rows of runs."""
    entries = []
    for one in made:
        head = {key: value for key, value in one.items() if key != "rows"}
        for r in one["rows"]:
            stats = {"rounds": 15, "median": r["us"] * 1e-6, "q1": r["us"] * 0.98e-6, "q3": r["us"] * 1.03e-6}
            entries.append(
                {"name": r["workload"], "extra_info": r | {"run": head, "peers": {"torch": 9.5}}, "stats": stats}
            )
    return {"datetime": "2026-12-01", "version": "5.3.1", "machine_info": {}, "benchmarks": entries}


def test_pytest_benchmarks_file_gives_the_same_runs_and_the_quartiles(tmp_path):
    made = run(row(us=10.0), row("wo_a-r16-S2-T64", 20.0))
    other = run(row("plain-r16-S1-T8", 5.0), commit="def5678")
    data = of_pytest_benchmark(made, other)
    data["benchmarks"].append({"name": "someone else's", "extra_info": {}, "stats": {}})
    first, second = runs.read(write(tmp_path / "b.json", data))
    assert first == made | {"rows": [r | {"q1_us": r["us"] * 0.98, "q3_us": r["us"] * 1.03} for r in made["rows"]]}
    assert second["commit"] == "def5678" and len(second["rows"]) == 1


@pytest.mark.parametrize(
    "content, says",
    [
        ('{"schema": 0, "rows": []}', "a.json: schema 0, this version reads 1."),
        ("{", "a.json is not JSON"),
        ("[]", "a.json is neither"),
        ('{"schema": 1, "rows": []}', "a.json lacks gpu, versions, commit, date, method, tiny."),
        ('{"benchmarks": [{"extra_info": {}}]}', "a.json holds no figures of this project's suites"),
    ],
)
def test_what_is_no_result_file_is_an_error_in_a_sentence(content, says, tmp_path, capsys):
    (tmp_path / "a.json").write_text(content)
    assert report(tmp_path / "a.json") == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_there_is_an_error(tmp_path, capsys):
    assert report(tmp_path / "none.json") == 2 and "none.json does not exist." in capsys.readouterr().err


def test_the_newest_figure_counts_whatever_the_order_of_files(tmp_path):
    write(tmp_path / "a.json", run(row(us=3.9), date="2026-12-01T10:00:00Z"))
    write(tmp_path / "b" / "b.json", run(row(us=4.2), row("wo_a-r16-S2-T64", 7.0)))
    found = runs.newest(runs.read_all([tmp_path]))[H200]
    assert (
        found["delta", "wo_a-r16-S2-T8"]["ours"]["us"] == 3.9 and found["delta", "wo_a-r16-S2-T64"]["ours"]["us"] == 7.0
    )


@pytest.mark.parametrize(
    "name, family",
    [
        ("wo_a-r16-S2-T8", "wo_a"),
        ("extra-curve-r16-S1-T9", "wo_a"),
        ("extra-wo_a_one_of_64-r16-S64-T8", "wo_a_one_of_64"),
        ("plan-S8-T64", "plan"),
        ("qwen3-30b-gate_up-r32-S1-T64", "qwen3-30b-gate_up"),
        ("wo_a_g4-r128-a32-T64", "wo_a_g4"),
        ("something else", "something else"),
    ],
)
def test_the_family_of_a_workload(name, family):
    assert runs.family({"workload": name}) == family


# --- the README's tables ---


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{tables.START}\nold\n{tables.END}\nafter\n")
    return path


def test_the_tables_are_written_checked_and_found_stale(tmp_path, readme, capsys):
    folder = tmp_path / "results"
    write(folder / "a.json", run(row(), row(us=19.7, contender="torch", variant="gather")))
    assert report(folder, "--readme", readme, "--check") == 1 and "stale" in capsys.readouterr().err
    assert report(folder, "--readme", readme) == 0 and report(folder, "--readme", readme, "--check") == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| wo_a-r16-S2-T8 | 0.21 | **4.2** | 5 | 3.7 | 9.0 (sglang best) | 19.7 (gather) |" in text
    assert "Measured 2026-11-30 at abc1234 (torch 2.11.0)." in text
    write(folder / "b.json", run(row(us=3.9), date="2026-12-01T10:00:00Z", commit="def5678"))
    assert report(folder, "--readme", readme, "--check") == 1
    readme.write_text(text.replace("4.2", "1.0"))
    assert report(folder, "--readme", readme, "--check") == 1


def test_tiny_runs_are_no_figures(tmp_path, readme):
    folder = tmp_path / "results"
    write(folder / "a.json", run(row(us=0.1), date="2026-12-02T10:00:00Z", tiny=True))
    assert report(folder, "--readme", readme) == 0 and tables.EMPTY in readme.read_text()
    write(folder / "b.json", run(row(us=3.9)))
    report(folder, "--readme", readme)
    assert "**3.9**" in readme.read_text() and "**0.1**" not in readme.read_text()


def test_a_readme_without_the_markers_is_an_error(tmp_path, readme, capsys):
    readme.write_text("nothing here")
    assert report(write(tmp_path / "a.json", run()), "--readme", readme) == 2
    assert "has no <!-- bench:start -->" in capsys.readouterr().err


def test_rows_stand_in_the_order_of_their_numbers(tmp_path, readme):
    names = ["wo_a-r64-S1-T8", "wo_a-r16-S8-T1024", "wo_a-r16-S8-T64", "wo_a-r16-S2-T8192"]
    report(write(tmp_path / "a.json", run(*map(row, names))), "--readme", readme)
    assert re.findall(r"\| (wo_a\S+)", readme.read_text()) == names[::-1]


def test_the_tax_in_the_readme(tmp_path, readme):
    rows = [
        row(
            f"plain-r{rank}-a{active}-T8",
            10.0 + active,
            "tax",
            active=active,
            base_us=10.0,
            apart_us=12.0 + 2 * active,
            best_peer_us=None,
        )
        for rank in (16, 32)
        for active in (0, 8)
    ]
    report(write(tmp_path / "a.json", run(*rows)), "--readme", readme)
    text = readme.read_text()
    assert "| layer | T | rank | base, µs | 0 adapters | 8 adapters |" in text
    assert "| plain | 8 | 16 | 10.0 | +0 / +20 | +80 / +180 |" in text and "| plain | 8 | 32 |" not in text


def test_the_curve_in_the_readme(tmp_path, readme):
    rows = [
        row("plain-r16-S1-T8", 4.0, "curve"),
        row("plain-r16-S1-T12", 5.0, "curve", jump=1.25),
        row("plain-r16-S8-T12", 6.0, "curve"),
        row("plain-idle-r16-S8-T12", 3.0, "curve", beside="plain-r16-S8-T12", times_beside=0.5),
        row("plain-r16in256-r256-S8-T8", 8.0, "curve"),
    ]
    report(write(tmp_path / "a.json", run(*rows)), "--readme", readme)
    curve, beside = readme.read_text().split("64 slots of which")
    assert "| T | plain r 16, 1 slot | plain r 16, 8 slots |\n|---|---|---|\n| 8 | 4.0 | – |\n| 12 | 5.0 (1.25) | 6.0 |" in curve
    assert "| T | plain, no adapter in the batch | plain, ranks of 16 padded to 256 |\n|---|---|---|\n" in beside
    assert "|\n| 8 | – | 8.0 |\n| 12 | 3.0 (0.50) | – |" in beside


def test_the_readme_shows_the_committed_results():
    assert report(ROOT / "bench" / "results", "--readme", ROOT / "README.md", "--check") == 0


# --- comparison ---


def compared(tmp_path, old_rows, new_rows, capsys) -> tuple[int, str]:
    old, new = (
        write(tmp_path / "old.json", run(*old_rows)),
        write(tmp_path / "new.json", run(*new_rows, date="2026-12-01T00:00:00Z")),
    )
    status = report(new, "--compare", old)
    return status, capsys.readouterr().out


def test_a_regression_beyond_the_noise_is_named_and_the_exit_status(tmp_path, capsys):
    old = [row(us=10.0), row("wo_a-r16-S2-T64", 10.0), row("wo_a-r16-S2-T256", 10.0)]
    new = [row(us=10.4), row("wo_a-r16-S2-T64", 10.6), row("wo_a-r16-S2-T256", 9.0)]
    status, said = compared(tmp_path, old, new, capsys)
    assert status == 1
    assert "REGRESSION delta wo_a-r16-S2-T64: 10.00 → 10.60 µs (+6.0 %, noise 5.0 % (default))" in said
    assert "improvement delta wo_a-r16-S2-T256" in said and "T8:" not in said
    assert said.endswith("1 regression, 1 improvements, 1 within the noise\n")
    assert compared(tmp_path, old, old, capsys)[0] == 0


def spread(us: float, percent: float) -> dict:
    return row(us=us, q1_us=us * (1 - percent / 200), q3_us=us * (1 + percent / 200))


def test_the_noise_is_the_spread_of_the_rounds_where_both_files_have_it(tmp_path, capsys):
    assert compared(tmp_path, [spread(10.0, 1)], [spread(10.3, 1)], capsys)[0] == 1  # 3 % against the least band, 2 %
    assert compared(tmp_path, [spread(10.0, 1)], [spread(10.15, 1)], capsys)[0] == 0
    assert (
        compared(tmp_path, [spread(10.0, 12)], [spread(11.0, 1)], capsys)[0] == 0
    )  # rounds 12 % apart: 10 % is no news
    assert compared(tmp_path, [row(us=10.0)], [spread(10.4, 1)], capsys)[0] == 0  # one file without: the default
    assert compared(tmp_path, [row(us=10.0)], [spread(10.9, 8)], capsys)[0] == 1
    assert compared(tmp_path, [row(us=10.0)], [spread(10.7, 8)], capsys)[0] == 0


def test_memory_and_the_cpus_time_are_compared_too(tmp_path, capsys):
    old, new = row(op="train", peak_mib=100.0), row(op="train", peak_mib=110.0)
    status, said = compared(tmp_path, [old], [new], capsys)
    assert status == 1 and "100.00 → 110.00 MiB at the peak (+10.0 %" in said
    assert compared(tmp_path, [row(op="host", us=10.0)], [row(op="host", us=12.0)], capsys)[0] == 0
    assert compared(tmp_path, [row(op="host", us=10.0)], [row(op="host", us=13.0)], capsys)[0] == 1


def test_other_gpus_and_contenders_are_not_compared_and_missing_rows_are_named(tmp_path, capsys):
    old = [
        row(us=1.0, contender="torch"),
        row("wo_a-r16-S2-T64", 5.0),
        row("wo_a-r16-S2-T256", 5.0),
        row("plan-S8-T1", 3.0, "plan"),
    ]
    status, said = compared(tmp_path, old, [row(us=2.0, contender="torch"), row("wo_a-r16-S2-T64", 5.0)], capsys)
    assert status == 0 and "gone delta wo_a-r16-S2-T256" in said and "plan" not in said
    new = write(tmp_path / "new.json", run(row(), gpu="NVIDIA B200"))
    assert report(new, "--compare", tmp_path / "old.json") == 2
    assert (
        "nothing to compare: no op and workload of ours is in both; new: NVIDIA B200, old: NVIDIA H200."
        in capsys.readouterr().err
    )


def test_the_verdict_is_symmetric():
    def verdict(old, new):
        return Change("g", "op", "w", "us", old, new, 0.05, True).verdict

    assert [verdict(100, 104.9), verdict(100, 105.1), verdict(104.9, 100), verdict(105.1, 100)] == [
        "same",
        "regression",
        "same",
        "improvement",
    ]


# --- the page ---


def some_of(made: dict) -> dict:
    """Fewer rows: every kind of picture, few panels."""
    keep = re.compile(r"plain-r(16|64)-(S1|S8|a\d+)-|plan-S8|train-r16|train-dsv3|none|qkv-r16|wo_a-r16-S8-T1$")
    return made | {"rows": [r for r in made["rows"] if keep.search(r["workload"])]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the report's folder, the runs in it): made-up figures with a comparison."""
    folder = tmp_path_factory.mktemp("report")
    old = made_up_runs.write(folder / "old.json", some_of(made_up_runs.run()))
    new = some_of(made_up_runs.run(1.1, "2026-12-01T10:00:00Z", "def5678"))
    new["rows"][0]["workload"] += "<script>alert(1)</script>"
    made_up_runs.write(folder / "new.json", new)
    assert report(folder / "new.json", "--compare", old, "--out", folder / "out") == 1
    return folder / "out", new


class Page(HTMLParser):
    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.links, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_loads_nothing(made):
    text = (made[0] / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and "script" not in page.tags
    assert page.links and all(link.startswith("#") for link in page.links)
    assert "@import" not in text and "url(http" not in text
    assert page.tags.count("svg") == len(list(made[0].glob("*.png")))
    said = "".join(page.text)
    for part in (
        "Latency",
        "Roofline",
        "LoRA's tax",
        "Idle cost",
        "Host cost",
        "Memory",
        "Against earlier figures",
        "def5678",
        "by formula",
    ):
        assert part in said, part


def test_pictures_of_every_kind_are_there_and_are_pngs(made):
    names = {path.stem.removeprefix("nvidia-made-up-") for path in made[0].glob("*.png")}
    assert names == {
        "latency-delta-plain", "latency-delta-other", "latency-plan-other", "roofline-delta", "tax-plain", "idle",
        "latency-curve-plain", "roofline-curve",
        "host", "host-plain-r16-s8-t8", "host-wo-a-r16-s8-t1", "memory", "memory-forward", "training", "changes",
    }  # fmt: skip
    for path in made[0].glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_page_follows_dark_mode_with_every_colour(made):
    from grouped_lora_ops.report.drawing import THEME

    text = (made[0] / "index.html").read_text(encoding="utf-8")
    styles, body = text[: text.index("</style>")], text[text.index("</style>") :]
    dark = styles[styles.index("prefers-color-scheme: dark") :]
    for colour, (variable, other) in THEME.items():
        assert f"{variable}:{colour};" in styles and f"{variable}:{other};" in dark
    assert not re.search("|".join(THEME), body, re.I)
    assert set(re.findall(r"#[0-9a-f]{6}\b", body, re.I)) == set()


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_in_both_modes():
    from grouped_lora_ops.report.drawing import BLUE, INK, MUTED, PAPER, THEME

    for colour in (INK, MUTED, BLUE):
        assert contrast(colour, PAPER) >= 4.5 and contrast(THEME[colour][1], THEME[PAPER][1]) >= 4.5


def test_a_curve_goes_through_the_measured_points():
    from grouped_lora_ops.report import pictures

    rows = [
        row(f"wo_a-r16-S{slots}-T{t}", 3.0 + t * slots, floor_us=0.1 * t) for slots in (1, 2, 8) for t in (1, 8, 64)
    ]
    (picture, _) = pictures.draw(runs.newest([run(*rows)])[H200])
    panel = picture.figure.axes[2]
    assert panel.get_title(loc="left") == "rank 16, 8 slots"
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
    assert (
        ([1, 8, 64], [11.0, 67.0, 515.0]) in drawn
        and ([1, 8, 64], [0.1, 0.8, 6.4]) in drawn
        and ([1, 8, 64], [9.0, 9.0, 9.0]) in drawn
    )
    assert panel.get_xscale() == panel.get_yscale() == "log"
    assert [t.get_text() for t in panel.get_xticklabels()] == ["1", "8", "64"]


def panels_of(drawn, name) -> dict:
    picture = next(picture for picture in drawn if picture.name == name)
    return {axis.get_title(loc="left"): axis for axis in picture.figure.axes if axis.get_visible()}


def points_of(panel) -> list:
    return [(list(line.get_xdata()), [round(y, 6) for y in line.get_ydata()]) for line in panel.lines]


def test_what_should_cost_nothing_is_drawn_beside_the_batch_without_it():
    from grouped_lora_ops.report import pictures

    curve = [
        row(f"plain-{kind}-r16-S8-T{t}", us, "curve", beside=f"plain-r16-S8-T{t}", times_beside=us / (4.0 + t), active=active)
        for kind, us, active in (("idle", 2.0, 0), ("r16in256", 9.0, 2))
        for t in (1, 8, 64)
    ]
    skew = [row(f"skew-dsv3-down-two-r32-S1-T{t}", 30.0, "expert_delta", twin_us=10.0 + t) for t in (64, 256, 4096)]
    old = row("extra-wo_a_none-r16-S8-T8", 2.5, active=0)
    drawn = pictures.draw(runs.newest([run(*curve, *skew, old)])[H200])
    panels = panels_of(drawn, "latency-curve-other")
    assert list(panels) == ["plain, no adapter in the batch", "plain, ranks of 16 padded to 256"]
    for panel in panels.values():
        assert ([1, 8, 64], [5.0, 12.0, 68.0]) in points_of(panel)
    (panel,) = panels_of(drawn, "latency-expert-delta-other").values()
    assert ([64, 256, 4096], [74.0, 266.0, 4106.0]) in points_of(panel)
    assert points_of(panels_of(drawn, "idle")["delta_ alone"]) == [([1, 8, 64], [2.0, 2.0, 2.0])], "the curve's, where there is one"


def test_the_tax_shows_five_per_cent_and_a_thousand():
    from grouped_lora_ops.report import pictures

    rows = [
        row(f"plain-r{rank}-a{active}-T64", us, "tax", active=active, base_us=10.0)
        for active, times in ((0, 1.05), (32, 11.0))
        for rank, us in ((8, 10.5), (256, 10.0 * times))
    ]
    (panel,) = panels_of(pictures.draw(runs.newest([run(*rows)])[H200]), "tax-plain").values()
    shown = {t.get_text(): t.get_window_extent().y0 for t in panel.get_yticklabels()}
    assert panel.get_yscale() == "symlog" and len(shown) == len(panel.get_yticklabels()), "no label twice"
    assert shown["+10 %"] - shown["0"] > 10 and shown["+1000 %"] - shown["+100 %"] > 10, "pixels"


def test_memory_of_a_forward_call_is_the_most_of_any_mix():
    from grouped_lora_ops.report import pictures

    rows = [
        row(f"qwen3-30b-r16-S{slots}-T{t}", 30.0, "expert_mlp", peak_mib=slots * t / 4, base_us=40.0)
        for slots in (1, 4)
        for t in (1, 8, 64)
    ]
    train = row("train-qwen3-30b-mlp-r16-S1-T64", 90.0, "expert_train", peak_mib=77.0)
    (panel,) = panels_of(pictures.draw(runs.newest([run(*rows, train)])[H200]), "memory-forward").values()
    assert points_of(panel) == [([1, 8, 64], [1.0, 8.0, 64.0])] and panel.get_title(loc="left") == "expert_mlp, qwen3-30b"


def texts_of(figure):
    """Every text that is drawn; ticks outside an axis's limits are not."""
    for legend in figure.legends:
        yield from legend.get_texts()
    for axis in figure.axes:
        if axis.get_visible():
            yield from (axis._left_title, axis.xaxis.label, axis.yaxis.label, *axis.texts)
            for one in (axis.xaxis, axis.yaxis):
                low, high = sorted(one.get_view_interval())
                yield from (
                    t.label1 for t in one.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()
                )


def test_no_label_is_cut_off(made):
    from grouped_lora_ops.report import pictures

    for picture in pictures.draw(runs.newest([made[1]])[made_up_runs.GPU]):
        picture.png()
        width, height = picture.figure.canvas.get_width_height()
        for text in texts_of(picture.figure):
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside or not text.get_text(), (picture.name, text.get_text())


def test_two_drawings_of_the_same_figures_are_the_same(made):
    from grouped_lora_ops.report import pictures

    found = runs.newest([run(*[row(f"wo_a-r16-S2-T{t}", 3.0 + t) for t in (1, 8, 64)])])[H200]
    once, twice = (pictures.draw(copy.deepcopy(found))[0] for _ in range(2))
    assert once.svg() == twice.svg() and once.png() == twice.png()


def test_figures_of_the_cpu_at_tiny_sizes_are_marked(tmp_path):
    write(tmp_path / "a.json", run(*[row(f"wo_a-r16-S2-T{t}", 3.0 + t) for t in (1, 8, 64)], gpu="CPU", tiny=True))
    assert report(tmp_path / "a.json", "--out", tmp_path / "out") == 0
    assert "they test the scripts and are no figures" in (tmp_path / "out" / "index.html").read_text()


def test_without_a_folder_the_page_goes_into_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report(write(tmp_path / "a.json", run())) == 0
    assert (tmp_path / "report" / "index.html").is_file() and "wrote report/index.html" in capsys.readouterr().out


def test_without_matplotlib_a_sentence_says_what_to_install_and_the_rest_works(tmp_path, readme):
    write(tmp_path / "a.json", run())
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom grouped_lora_ops.__main__ import main\n"
        f"assert main(['report', '{tmp_path}/a.json', '--readme', '{readme}', '--compare', '{tmp_path}/a.json']) == 0\n"
        f"sys.exit(main(['report', '{tmp_path}/a.json', '--out', '{tmp_path}/out']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("report: drawing needs matplotlib: pip install 'grouped_lora_ops[report]'.")
    assert not (tmp_path / "out").exists() and "**4.2**" in readme.read_text()
