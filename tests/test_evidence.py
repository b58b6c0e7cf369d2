"""What the documentation says of races and numbers, against the files it is made from."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from test_race_plan import Valley, gone

from lab.docsite import evidence, plots, precision, races
from lab.races import plan, rates, records
from rlx_optim import list_optimizers

ROOT = Path(__file__).parent.parent


def forget():
    for made in (evidence.pool, evidence.result, evidence.cost):
        made.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where runs are looked for, empty."""
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "gpt").mkdir(parents=True)
    forget()
    yield tmp_path / "benchmarks" / "gpt"
    forget()


def row(text, title):
    """The cells of a table's row."""
    (line,) = (line for line in text.splitlines() if line.startswith((f"| [{title}]", f"| {title} |")))
    return [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in line.strip("|").split("|")]


def absent():
    """What the table says was not run."""
    return re.findall(r"\[(\w+)\]", evidence.results().partition("Not run yet: ")[2])


def test_without_runs_nobody_has_a_row(folder):
    assert len(absent()) == len(list_optimizers())
    assert "| [" not in evidence.results()
    assert evidence.sentence("muon") == "not run by us on a GPU yet"
    assert evidence.marks().count("not measured yet") == 2
    assert "Nothing" in evidence.figures()
    assert "No run" in evidence.source()
    assert "No run" in evidence.storage()
    assert row(evidence.starts(), "Lion")[3] == "0.0003"


def test_a_search_alone_is_no_result(folder):
    times = iter(range(100))
    gone(records.Pool(Valley(), file=folder / "a.jsonl"), seconds=8, clock=lambda: next(times))
    forget()
    assert "AdamW" in absent()
    assert "0.002: " in row(evidence.rates(), "AdamW")[2]


@pytest.fixture
def raced(folder):
    model = Valley(muon=0.08, soap=0.3, lion=-0.2)
    gone(records.Pool(model, file=folder / "a.jsonl"), optimizers=("adamw", "muon", "soap", "lion"))
    gone(records.Pool(model, file=folder / "b.jsonl"), "storage", ("adamw", "lion"))
    forget()
    return records.read([folder / "a.jsonl"])


def full(records, name, steps=1000):
    start = rates.SETTINGS["gpt"][name]
    return {
        r["seed"]: r for r in records
        if (r["optimizer"], r["steps"]) == (name, steps) and r["settings"]["lr"] == start["lr"]
        and r["settings"].get("weight_decay") == start.get("weight_decay") and r["seed"] < 10
    }  # fmt: skip


def test_the_table_is_what_the_records_say(raced):
    adamw, muon = full(raced, "adamw"), full(raced, "muon")
    losses = [r["test_loss"] for r in adamw.values()]
    assert row(evidence.results(), "AdamW")[3:6] == [
        f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}",
        f"{statistics.fmean(r['train_loss'] for r in adamw.values()):.3f}",
        "5, 3",
    ]
    cells = row(evidence.results(), "Muon")
    difference = statistics.fmean(muon[seed]["test_loss"] - adamw[seed]["test_loss"] for seed in range(3))
    assert cells[6].startswith(f"{difference:+.4f}".replace("-", "−"))
    assert cells[6].endswith("ahead")
    assert cells[7] == "600, 60%"  # each step takes as long here
    assert row(evidence.results(), "SOAP")[7] == "400, 40%"
    assert row(evidence.results(), "Lion")[6].endswith("behind")
    assert row(evidence.results(), "Lion")[7] == "> 1,000"
    assert evidence.marks().count("reached") == 2
    order = re.findall(r"^\| \[(\w+)\]", evidence.results(), re.MULTILINE)
    assert order[:4] == ["SOAP", "Muon", "AdamW", "Lion"]


def test_without_shorter_runs_it_is_known_what_was_enough(raced, folder):
    kept = [r for r in raced if r["optimizer"] != "muon" or r["seed"] == records.TUNING_SEED or r["steps"] == 1000]
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    gone(records.Pool(Valley(), file=folder / "c.jsonl"), "cost", ("muon", "lion"))  # a few steps, which are no shorter run
    forget()
    assert row(evidence.results(), "Muon")[7] == "≤ 1,000, ≤ 100%"
    assert row(evidence.results(), "Lion")[7] == "> 1,000"
    assert "Muon, AdamW's loss in at most 60% of AdamW's seconds: **not measured yet**" in evidence.marks()


def test_where_no_decay_is_given_it_is_the_default(folder):
    gone(records.Pool(Valley(), file=folder / "a.jsonl"), optimizers=("adamw", "scion"))
    forget()
    assert row(evidence.results(), "Scion")[2] == "1"
    assert row(evidence.rates(), "Scion")[1] == "1"
    assert [cell.partition(":")[0] for cell in row(evidence.rates(), "Scion")[3].split(", ")] == ["0.1", "1"]
    assert "Scion 1" in evidence.decays()


def test_the_cost_is_of_full_runs_or_of_a_few_steps(raced, folder):
    assert row(evidence.costs(), "Muon")[1:] == ["10.0", "0.50", "0.00"]
    assert "Adan" not in evidence.costs()
    gone(records.Pool(Valley(), file=folder / "c.jsonl"), "cost", ("adan", "sophia"))
    short = records.read([folder / "c.jsonl"])
    (folder / "c.jsonl").write_text("".join(json.dumps(r | {"ms_per_step": 2.5, "seconds": 9.0}) + "\n" for r in short))
    forget()
    # AdamW's passes of 9.5 ms, not the minute in which a few steps were made
    assert row(evidence.costs(), "Adan")[1:] == ["12.0", "2.50", "0.00"]
    assert row(evidence.costs(), "Sophia")[1] == f"{9.5 * 1.1 + 2.5:.1f}"  # an estimate every ten steps


def test_a_verdict_before_three_rates_and_seeds_were_run_whole_is_one_so_far(raced, folder):
    def without(left_out):
        kept = [r for r in raced if not left_out(r)]
        (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
        forget()

    others = {r["settings"]["lr"] for r in raced if r["steps"] == 1000} - {
        full(raced, n)[0]["settings"]["lr"] for n in ("muon", "adamw")
    }
    without(lambda r: (r["optimizer"], r["steps"]) == ("muon", 1000) and r["settings"]["lr"] in others)
    assert row(evidence.results(), "Muon")[5] == "3, 1"
    assert row(evidence.results(), "Muon")[6].endswith("ahead so far")
    assert row(evidence.results(), "SOAP")[6].endswith("ahead")
    assert "the best of 1 rate so far), ahead of AdamW so far" in evidence.sentence("muon")
    without(lambda r: (r["optimizer"], r["steps"]) == ("adamw", 1000) and r["settings"]["lr"] in others)
    assert row(evidence.results(), "SOAP")[6].endswith("ahead")  # its own are whole, which is told once for all
    assert "Every verdict is one so far: of AdamW's own rates" in evidence.results()
    assert "ahead of AdamW so far" in evidence.sentence("soap")
    assert evidence.marks().count("reached so far") == 2
    without(lambda r: (r["optimizer"], r["steps"], r["seed"]) == ("muon", 1000, 2))
    assert row(evidence.results(), "Muon")[5] == "2, 3"
    assert row(evidence.results(), "Muon")[6].endswith("ahead so far")  # nor before three seeds
    assert "Every verdict" not in evidence.results()
    assert row(evidence.results(), "SOAP")[6].endswith("ahead")


def test_where_to_start_and_with_what_decay_follow_from_what_was_run(raced, folder):
    assert "the best of 5 rates" in row(evidence.starts(), "Muon")[4]
    times = iter(range(100))
    gone(records.Pool(Valley(best=3.0), file=folder / "d.jsonl"), optimizers=("sgd",), seconds=8, clock=lambda: next(times))
    forget()
    assert row(evidence.starts(), "SGD")[3] == "0.9"  # tried, not raced
    assert "short runs" in row(evidence.starts(), "SGD")[4]
    assert evidence.sentence("sgd") == "its rate is searched, no full run of ours yet"
    assert evidence.decays() == "Lion 1, AdamW 0.1, SOAP 0.1, Muon 0.01"


def test_the_time_of_runs_that_shared_the_device_does_not_count(folder):
    model = Valley(muon=0.08)
    for name, shared in (("a.jsonl", True), ("b.jsonl", False)):
        pool = records.Pool(model, file=folder / name, beside=sorted(folder.glob("*.jsonl")), shared=shared)
        gone(pool, optimizers=("adamw", "muon"))
        forget()
        assert row(evidence.results(), "Muon")[7] == ("600" if shared else "600, 60%")  # losses count
        assert ("Muon" in evidence.costs()) is not shared


def test_training_steps_are_shown_beside_adamw(folder):
    assert evidence.steps() == evidence.frequencies() == "No run is committed yet."
    gone(records.Pool(Valley(), file=folder / "s.jsonl"), "steps", ("adamw", "soap"))
    forget()
    assert row(evidence.steps(), "SOAP, precondition frequency 1")[1:] == ["10.0", "1.00×", "0.50"]
    assert len(evidence.steps().splitlines()) == 2 + 5
    gone(records.Pool(Valley(), file=folder / "f.jsonl"), "frequency", ("soap",))
    forget()
    short, half = (f"{1 + 100 / steps + 0.01 * math.sin(records.TUNING_SEED):.3f}" for steps in (250, 500))
    assert row(evidence.frequencies(), "SOAP, a new basis every step")[1:] == [short, half, "10.0", "–", "–"]
    assert row(evidence.frequencies(), "AdamW")[1:] == ["–", "–", "10.0", "–", "–"]


def test_newer_bases_may_reach_adamws_loss_sooner(folder):
    model = Valley(noise=0.0)
    gone(records.Pool(model, file=folder / "a.jsonl"), optimizers=("adamw", "soap"))
    gone(records.Pool(model, file=folder / "s.jsonl"), "steps", ("adamw", "soap"))
    forget()
    assert "100% (1000 steps): missed" in evidence.marks()
    train = model.train

    def gaining(name, settings, *more):
        model.gains["soap"] = 0.3 * (settings.get("precondition_frequency") == 4)
        return train(name, settings, *more)

    model.train = gaining
    gone(records.Pool(model, file=folder / "f.jsonl", beside=[folder / "a.jsonl"]), "frequency", ("soap",))
    forget()
    assert row(evidence.frequencies(), "AdamW")[4:] == ["1,000", "100%"]
    assert row(evidence.frequencies(), "SOAP, every 10 steps")[4:] == ["1,000", "100%"]
    assert row(evidence.frequencies(), "SOAP, every 4 steps")[4:] == ["400", "40%"]
    assert row(evidence.frequencies(), "SOAP, every 2 steps")[4:] == ["–", "–"]
    assert "40% (400 steps, every 4 steps): reached" in evidence.marks()
    runs = [{**r, "shared": "frequency" in str(r["settings"])} for r in records.read([folder / "f.jsonl"])]
    (folder / "f.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs))  # whose seconds do not count
    forget()
    assert row(evidence.frequencies(), "SOAP, every 4 steps")[4:] == ["400", "–"]
    assert "100% (1000 steps): missed" in evidence.marks()


def test_sentences_go_with_the_verdicts(raced):
    assert "ahead of AdamW (loss −" in evidence.sentence("muon")
    assert "AdamW's loss in 600 steps and 60% of its seconds" in evidence.sentence("muon")
    assert "behind AdamW (loss +" in evidence.sentence("lion")
    assert "AdamW's loss in" not in evidence.sentence("lion")
    assert "beside" not in evidence.sentence("adamw")
    every = evidence.pool().records
    assert len(every) == len(raced) + 18
    assert f"{len(every)} runs, {sum(r['steps'] for r in every):,} training steps" in evidence.source()


def test_storage_is_compared_at_equal_seeds(raced):
    cells = row(evidence.storage(), "AdamW")
    assert cells[2:] == [cells[2]] * 2
    assert cells[2].startswith("−0.0000") or cells[2].startswith("+0.0000")
    assert cells[2].endswith("level")
    assert evidence.compared({0: 2.0}, {0: 1.0, 1: 1.1}).endswith("higher (1 seed)")


def test_pictures_are_drawn_of_what_is_there(raced):
    pytest.importorskip("matplotlib")
    for of in plots.TOLD:
        drawn = plots.told(of, "light").decode()
        assert all(f">{title}<" in drawn for title in ("AdamW", "Muon", "SOAP", "Lion"))
        assert ">Sophia<" not in drawn
    assert evidence.figures().count("](assets/plots/evidence-") == 2 * len(plots.TOLD)


def test_the_committed_runs_are_whole():
    forget()
    files = sorted(ROOT.glob(evidence.FILES))
    known = records.read(files)
    assert len(known) == sum(len(file.read_text().splitlines()) for file in files)
    assert len(evidence.pool().records) == len(known)  # under one and the same conditions, none twice
    for record in known:
        assert {"settings", "seed", "steps", "versions", "device", "corpus", "seconds", "peak_bytes", "loss"} <= record.keys()
    for name in ("adamw", "muon", "soap"):
        found = evidence.result(name)
        if found is not None:
            losses = [
                r["test_loss"] for r in known
                if r["optimizer"] == name and r["steps"] == 1000 and r["settings"] == found.settings and r["seed"] != records.TUNING_SEED
            ]  # fmt: skip
            assert row(evidence.results(), evidence.spec_class(name).title)[3].startswith(f"{statistics.fmean(losses):.4f}")


def test_what_the_page_says_of_learning_by_heart_is_so():
    forget()
    every = [r["train_loss"] for name in list_optimizers() for r in evidence.pool().of(name, 1000) if "train_loss" in r]

    def run(name, lr, decay, steps=1000):
        runs = evidence.pool().of(name, steps, 0)
        return next(r for r in runs if (r["settings"]["lr"], r["settings"]["weight_decay"]) == (lr, decay))

    long, *shorter = (run("soap", 0.00173, 0.5, steps) for steps in (1000, 600, 750))
    fast = run("soap", 0.0156, 0.5)
    assert long["train_loss"] == min(every)
    assert f"{long['train_loss']:.3f} {fast['train_loss']:.3f}" == "0.433 0.589"
    assert f"{long['test_loss'] - fast['test_loss']:.2f}" == "0.09"
    assert long["test_loss"] > max(r["test_loss"] for r in shorter)
    weak = run("muon", 0.0346, 0.01)
    assert [f"{weak['train_loss']:.3f}", f"{weak['test_loss']:.3f}"] == ["0.436", "0.839"]
    assert f"{run('muon', 0.0346, 0.01, 600)['test_loss']:.3f}" == "0.813"
    assert run("muon", 0.0346, 0.25)["test_loss"] < run("muon", 0.0346, 0.25, 600)["test_loss"]
    for name, small, large, decay, said in (
        ("muon", 0.02, 0.06, 0.25, "0.02"), ("nadamw", 0.002, 0.00346, 0.5, "0.01"),
    ):  # fmt: skip
        assert f"{run(name, small, decay)['test_loss'] - run(name, large, decay)['test_loss']:.2f}" == said


def test_what_the_page_says_of_rates_is_so():
    forget()
    page = (ROOT / "docs" / "evidence.md").read_text()
    pool, whole, largest = evidence.pool(), [], []
    for name in list_optimizers():
        search = plan.Search(pool, name, 1000)
        best = [pool.has(search.whole(rate)) for rate in search.rates()[:3]]
        if all(best):
            whole.append(name)
            if min(best, key=search.score)["settings"]["lr"] == max(r["settings"]["lr"] for r in best):
                largest.append(name)
    assert f"Of the {len(whole)} whose three best rates were all run whole, {len(largest)} ended lowest with the largest" in page
    assert "adamw" in largest
    bounded = [name for name in list_optimizers() if evidence.result(name).bounded]
    assert bounded == list_optimizers()
    assert f"That is so of all {len(bounded)} by now" in page
    adamw, before = (
        evidence.result("adamw"),
        plan.Search(pool, "adamw", 1000).losses({**evidence.result("adamw").settings, "lr": 0.002}, 1000),
    )
    assert f"AdamW went from {statistics.fmean(before.values()):.4f} to {adamw.mean:.4f}" in page
    soap, search = evidence.result("soap"), plan.Search(pool, "soap", 1000)
    first = pool.has(next(search.full()))
    assert f"{first['test_loss'] - adamw.mean:.2f} {soap.settings['lr'] / first['settings']['lr']:.0f}" == "0.07 9"
    assert soap.lead.verdict == "ahead"


def test_what_the_page_says_of_kronpsgd_is_so():
    forget()
    search = plan.Search(evidence.pool(), "kronpsgd", 1000)
    winner = search.winner()
    assert (winner["lr"], winner["weight_decay"]) == (0.001, 2.5)
    rarely = [r for r in evidence.pool().of("kronpsgd", 1000) if r["settings"] == winner]
    always = search.done(search.fitted())
    assert len(rarely) == len(always) == 3

    def broken(run):
        """Within these steps it is far above where it was."""
        return max(run["loss"][46:58]) > 1.5 * min(run["loss"][:46])

    lost, back = [[r for r in runs if broken(r)] for runs in (rarely, always)]
    assert (len(lost), len(back)) == (2, 1)
    assert min(r["test_loss"] for r in lost) > 1.2
    assert min(back[0]["loss"][57:60]) < min(back[0]["loss"][:47])
    assert max(r["test_loss"] for r in always) < 0.82
    assert row(evidence.fits(), "in every step")[2].endswith("level")
    runs = {r["settings"]["lr"]: r for r in evidence.pool().of("kronpsgd", 1000, 0)}
    assert f"{runs[0.000577]['test_loss']:.3f} {runs[0.00173]['test_loss']:.2f}" == "0.827 0.83"
    assert not broken(runs[0.000577])
    one, other = (next(r for r in several if r["seed"] == 0) for several in (rarely, always))
    assert max(other["loss"][46:50]) > 2 * max(one["loss"][46:50])  # up to step 500 they do the same
    assert max(runs[0.00173]["loss"][28:32]) > 3
    assert runs[0.003]["diverged_at"] is not None
    heavy = next(r for r in evidence.pool().of("kronpsgd", 500) if r["settings"]["weight_decay"] == 12.5)
    assert max(heavy["loss"][20:]) > 2 * heavy["loss"][20]
    assert evidence.result("kronpsgd").lead.verdict == "unclear"


def test_without_runs_of_kronpsgd_nothing_is_said_of_its_fits(raced):
    assert evidence.fits() == "No run is committed yet."


def test_what_the_page_says_of_soaps_frequency_is_so():
    forget()
    by = {n: row(evidence.frequencies(), f"SOAP, {evidence.often(n)}") for n in plan.FREQUENCIES}
    adamw = row(evidence.frequencies(), "AdamW")
    assert float(by[1][1]) < float(by[2][1]) < float(by[4][1]) < float(adamw[1]) < float(by[10][1])
    assert float(by[2][1]) - float(by[1][1]) < 0.011
    assert by[10][4] == "750"
    assert by[4][4:] == ["600", "99%"]
    for steps, share in ((600, "88%"), (500, "73%")):
        assert f"{steps * float(by[4][3]) / (1000 * float(adamw[3])):.0%}" == share
    whole = evidence.seconds("adamw", 1000, {})
    runs = [r for r in evidence.pool().whose["soap"] if r["settings"].get("precondition_frequency") == 4 and r["seed"] < 10]
    for lr, said in ((0.0156, 1.6), (0.009, 2.4)):
        mine = [r for r in runs if r["settings"]["lr"] == lr and r["steps"] == 600]
        assert len(mine) == 3
        first = [r["seconds"] - 0.6 * r["training_ms"] for r in mine]  # 600 steps, in seconds
        assert statistics.fmean(first) == pytest.approx(said, abs=0.05)
        if lr == 0.0156:
            assert f"{statistics.fmean(first) / whole:.0%}" == "9%"
    short = [r["test_loss"] for r in runs if r["steps"] == 500]
    assert f"{statistics.fmean(short) - evidence.result('adamw').mean:.2f}" == "0.02"


def test_what_the_page_says_of_two_widths_is_so():
    forget()
    share = {name: evidence.result(name).settings["lr"] / rates.SETTINGS["char-gpt"][name]["lr"] for name in list_optimizers()}
    assert {name for name, s in share.items() if s < 0.4} == {"radam", "lion", "kronpsgd"}
    assert {name for name, s in share.items() if s > 2} == {"scion", "normuon", "prodigy"}
    assert all(0.49 < s < 2 for s in share.values() if 0.4 < s < 2)


# ---- the other pages ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["digits-mlp", "char-gpt"])
def test_the_small_races_are_those_committed(model):
    found = json.loads((ROOT / "benchmarks" / "race" / f"{model}.json").read_text())
    assert list(found["optimizers"]) == list(rates.SETTINGS[model])
    assert row(races.by_optimizer(model), "Muon")[1] == f"{found['optimizers']['muon']['lr']:g}"
    assert row(races.by_optimizer(model), "Muon")[2].startswith(f"{found['optimizers']['muon']['accuracy']['mean']:.1%}")
    assert found["command"] in races.source(model)


def test_the_page_of_numbers_says_what_was_measured():
    found = json.loads((ROOT / "benchmarks" / "precision.json").read_text())
    assert row(precision.small(), "AdamW")[3] == f"{found['small']['adamw']['1e-08']:.0%}"
    assert row(precision.spikes(), "SGD")[1] == f"{found['spikes']['SGD']['moved']:.0f}"
    assert row(precision.products(), "Gaussian")[3] == f"{found['products']['Gaussian']['bfloat16']:.1e}".replace("e-0", "e-")
    # what the text says of them
    assert found["small"]["adamw"]["1e-08"] == pytest.approx(0.63, abs=0.06)
    assert found["small"]["lion"]["1e-12"] == pytest.approx(1)
    assert found["spikes"]["AdamW"]["after_99"] == pytest.approx(0.1, abs=0.02)
    assert found["spikes"]["AdamW, b2 0.95"]["after_99"] > found["spikes"]["AdamW"]["after_99"]
    assert min(found["spikes"], key=lambda name: found["spikes"][name]["after_20"]) == "Adafactor"
    assert found["spikes"]["AdamW, skip_above 6"]["after_20"] == pytest.approx(1, abs=0.01)
    assert all(found["spikes"][name]["after_20"] > 0.95 for name in ("Lion", "Muon", "NorMuon", "Lamb", "MARS"))
    weights, outside = found["bfloat16"], found["outside"]
    assert all(each["bfloat16, nearest"] == 0 > each["float32"] for each in weights.values())
    for name in ("adamw", "lion", "adafactor", "lamb"):
        assert weights[name]["bfloat16, stochastic"] == pytest.approx(weights[name]["float32"], rel=0.01)
    assert row(precision.outside(), "SOAP, eps 1e-6")[1:] == [
        f"{outside['SOAP, eps 1e-6'][form]:.0%}" for form in outside["SOAP"]
    ]
    for name in ("SOAP", "pytorch_optimizer's SOAP"):
        assert min(outside[name].values()) > 0.98
    assert max(outside["SOAP, eps 1e-4"].values()) < 0.02
    for kind in found["products"].values():
        assert kind["float32"] < kind["float16"] < kind["bfloat16"]
