"""A race in pieces: the runs of a plan, what is skipped, what is counted, when it stops, and what may be said of it."""

import dataclasses
import json
import math

import pytest

import rlx_optim
from lab.races import command, leads, plan, rates, records
from rlx_optim import cli
from rlx_optim.race import Run
from rlx_optim.race.digits import MLP
from rlx_optim.registry import spec_class


class Valley:
    """In place of a model: the loss is known from the settings at once, least at `best` times the rate a search begins at."""

    name, title, metric, decides, goal, steps, seeds = "gpt", "a valley", "test_loss", "validation_loss", None, 1000, 3
    engines, devices, device, halves = ("auto",), ("cpu",), "cpu", False

    def __init__(self, best=1.0, noise=0.01, **gains):
        self.best, self.noise, self.gains, self.trained = best, noise, gains, []

    def describe(self):
        return {"device": "paper", "corpus": "none", "parameters": 1, "batch": 1}

    def train(self, optimizer, settings, steps, seed, engine, tick):
        self.trained.append((optimizer, settings["lr"], steps, seed))
        off = math.log(settings["lr"] / (self.best * rates.SETTINGS["gpt"][optimizer]["lr"]))
        loss = 1.0 + 0.1 * off**2 + 100 / steps - self.gains.get(optimizer, 0.0) + self.noise * math.sin(seed)
        loss += 0.05 * (settings.get("weight_decay", 0) > rates.SETTINGS["gpt"][optimizer].get("weight_decay", 0))
        if off > math.log(20):
            return Run(seed, [5.0, math.nan], [1.0, 2.0], {}, 0.5, 8, 0, 1, "paper")
        ends = {"test_loss": loss, "validation_loss": loss, "train_loss": loss, "accuracy": 0.5}
        return Run(seed, [loss] * steps, [0.01 * (i + 1) for i in range(steps)], ends, 0.5, 8, 16, None, "paper")


def quiet(words):
    pass


def gone(pool, name="race", optimizers=("adamw",), seconds=None, clock=None):
    return plan.go(
        pool, name, optimizers, 1000, plan.Deadline(seconds, *([clock] if clock else [])), {"versions": {"torch": "0"}}, quiet
    )


# ---- searches ---------------------------------------------------------------------------------------------------------
def test_adamw_is_searched_first_then_run_with_five_seeds():
    model = Valley()
    pool = records.Pool(model)
    assert gone(pool)
    start = rates.SETTINGS["gpt"]["adamw"]["lr"]
    tuned = [(lr / start, steps) for _, lr, steps, seed in model.trained if seed == records.TUNING_SEED]
    assert [factor for factor, _ in tuned] == pytest.approx([1, 3, 1 / 3, 3**0.5, 3**-0.5, 1, 1], rel=0.01)
    assert [steps for _, steps in tuned] == [250] * 5 + [500] * 2  # the last: two decays
    full = [(lr / start, seed) for _, lr, steps, seed in model.trained if steps == 1000]
    assert [seed for factor, seed in full if factor == 1] == [0, 1, 2, 3, 4]
    assert sum(seed == 0 for _, seed in full) == 3  # the best three
    assert len(model.trained) == len(set(pool.taken))  # nothing twice


def test_more_rates_and_seeds_go_first_to_those_whose_place_is_in_doubt():
    model = Valley(lion=-0.3, lamb=0.02, sgd=-0.1)
    gone(records.Pool(model), optimizers=("adamw", "lion", "sgd", "lamb"))
    again = [name for name, _, steps, seed in model.trained if (steps, seed) == (1000, 1)]
    assert again == ["adamw", "lamb", "sgd", "lion"]


@pytest.mark.parametrize(("best", "last"), [(9.0, 27), (1 / 9, 1 / 27)])
def test_a_search_goes_on_while_the_best_is_at_an_edge(best, last):
    model = Valley(best)
    pool = records.Pool(model)
    search = plan.Search(pool, "lion", 1000)
    while job := next((job for job in search.coarse() if pool.has(job) is None), None):
        pool.add(job, model.train(job.optimizer, job.settings, job.steps, job.seed, "auto", quiet), {})
    start = rates.SETTINGS["gpt"]["lion"]["lr"]
    tried = [record["settings"]["lr"] / start for record in pool.records]
    assert tried[-1] == pytest.approx(last, rel=0.02)
    assert len(tried) == 5
    assert search.tried(250, records.TUNING_SEED)[0]["settings"]["lr"] == pytest.approx(best * start, rel=0.02)


@pytest.mark.parametrize(("optimizer", "best", "tried"), [
    ("adamw", 0.1, [0.1, 0.5]), ("adamw", 0.5, [0.1, 0.5, 2.5]), ("adamw", 100.0, [0.1, 0.5, 2.5, 12.5]),
    ("adam", 0.0, [0, 0.1]), ("adam", 0.1, [0, 0.1, 0.5]),
])  # fmt: skip
def test_decays_are_tried_at_half_length_while_the_largest_is_the_best(optimizer, best, tried):
    model = Valley()
    model.train = lambda name, settings, steps, seed, *_: Run(
        seed, [1.0] * steps, [1.0] * steps, {"validation_loss": 1 + abs(settings.get("weight_decay", 0.0) - best), "test_loss": 1.0},
        0.5, 8, 0, None, "paper",
    )  # fmt: skip
    pool = records.Pool(model)
    assert gone(pool, optimizers=(optimizer,))
    decays = [r["settings"].get("weight_decay", 0) for r in pool.records if (r["steps"], r["seed"]) == (500, records.TUNING_SEED)]
    assert decays == tried
    settled = {r["settings"].get("weight_decay", 0) for r in pool.records if r["steps"] == 1000}
    assert settled == {min(tried, key=lambda decay: abs(decay - best))}


@pytest.mark.parametrize(("best", "factors"), [
    (1.0, [1, 3**0.5, 3**-0.5]),  # in the middle
    (3.0, [1, 3**0.5, 3**-0.5, 3, 3 * 3**0.5]),  # where a search had the rates to either side
    (100.0, [1, 3**0.5, 3**-0.5, 3, 3 * 3**0.5, 9, 9 * 3**0.5, 27]),  # as far as a search goes
    (1 / 9, [1, 3**0.5, 3**-0.5, 1 / 3, 1 / 3 * 3**-0.5, 1 / 9, 1 / 9 * 3**-0.5]),
])  # fmt: skip
def test_at_full_length_rates_go_on_while_the_best_is_at_an_edge(best, factors):
    model, longer = Valley(), Valley(best)
    pool, train = records.Pool(model), model.train
    model.train = lambda *given: (longer.train if given[2] == 1000 else train)(*given)
    assert gone(pool)
    start = rates.SETTINGS["gpt"]["adamw"]["lr"]
    tried = [r["settings"]["lr"] / start for r in pool.of("adamw", 1000, 0)]
    assert tried == pytest.approx(factors, rel=0.02)
    searched = {r["settings"]["lr"] for r in pool.of("adamw", 250)}
    assert {r["settings"]["lr"] for r in pool.of("adamw", 1000, 0)[:4]} <= searched  # not another rounding of it
    assert {r["settings"]["lr"] for r in pool.of("adamw", 1000, 4)} == {plan.Search(pool, "adamw", 1000).winner()["lr"]}


def test_a_rate_that_diverged_in_a_short_run_gets_no_long_one():
    model = Valley(9.0)
    pool, train = records.Pool(model), model.train

    def diverging(name, settings, steps, seed, *more):
        if settings["lr"] > 2 * rates.SETTINGS["gpt"][name]["lr"] and steps < 1000:
            return Run(seed, [5.0, math.nan], [1.0, 2.0], {}, 0.5, 8, 0, 1, "paper")
        return train(name, settings, steps, seed, *more)

    model.train = diverging
    assert gone(pool)
    assert max(r["settings"]["lr"] for r in pool.of("adamw", 1000)) < 2 * rates.SETTINGS["gpt"]["adamw"]["lr"]


def test_shorter_runs_until_adamws_loss_is_missed():
    for gain, expected in ((-0.1, []), (0.0, [600, 750]), (0.08, [600, 500]), (0.3, [600, 500, 400])):
        model = Valley(muon=gain, noise=0.0)
        pool = records.Pool(model)
        assert gone(pool, optimizers=("adamw", "muon"))
        short = [steps for name, _, steps, seed in model.trained if name == "muon" and steps < 1000 and seed == 0 and steps != 60]
        assert short == expected
        again = {
            (steps, seed) for name, _, steps, seed in model.trained if name == "muon" and 250 < steps < 1000 and seed in (1, 2)
        }
        least = {0.08: 600, 0.3: 400}.get(gain)
        assert again == ({(least, 1), (least, 2)} if least else set())


def test_a_race_of_all_is_finite_and_gives_everyone_full_runs():
    model, names = Valley(), ["sgd", "adamw", "lion", "soap", "kronpsgd", "muon", "prodigy"]
    pool = records.Pool(model)
    assert gone(pool, optimizers=names)
    assert [entry.optimizer for entry in plan.entries(pool, names, 1000)] == names
    for entry in plan.entries(pool, names, 1000):
        assert len(entry.runs) == plan.SEEDS.get(entry.optimizer, 3)
        assert len(entry.grid) >= 5
    order = list(dict.fromkeys(name for name, *_ in model.trained))
    assert order[:3] == ["adamw", "muon", "soap"]


def test_storage_compares_formats_at_equal_settings_and_seeds():
    model = Valley()
    model.halves = True
    pool = records.Pool(model)
    assert gone(pool, "storage", rlx_optim.list_optimizers())
    assert {record["optimizer"] for record in pool.records} == set(plan.STORAGE)
    ours = [record for record in pool.records if record["optimizer"] == "muon"]
    stored = [r for r in ours if "weights" not in r["settings"]]
    assert sorted((r["settings"]["state_dtype"], r["seed"]) for r in stored) == sorted(
        (form, seed) for form in plan.FORMATS for seed in range(3)
    )
    rounded = "rounding" in spec_class("muon").fields
    assert len(ours) - len(stored) == rounded * 3 * len(plan.HALVES)
    assert {r["steps"] for r in ours} == {500}
    assert pool.of("muon") == []  # they are no part of a search


def test_the_cost_of_everyone_takes_one_short_run():
    model = Valley()
    assert gone(records.Pool(model), "cost", rlx_optim.list_optimizers())
    assert [(name, steps) for name, _, steps, _ in model.trained] == [(name, 60) for name in rlx_optim.list_optimizers()]


def test_training_steps_are_compared_at_more_than_one_setting():
    model = Valley()
    pool = records.Pool(model)
    assert gone(pool, "steps", rlx_optim.list_optimizers())
    assert [(r["optimizer"], r["steps"]) for r in pool.records] == [(n, 120) for n, more in plan.STEPS.items() for _ in more]
    assert [r["settings"]["precondition_frequency"] for r in pool.whose["soap"]] == [10, 4, 2, 1]
    assert pool.of("soap") == []  # they are no part of a search
    assert all(r["training_ms"] == pytest.approx(10.0) for r in pool.records)
    assert records.late_ms([5.0]) == 5000.0
    assert records.late_ms([100.0, 101.0, 102.0, 104.0]) == 1500.0  # the first may take long
    assert records.late_ms([100.0, 101.0, 103.0]) == 1500.0


def test_bases_are_renewed_at_several_frequencies():
    model = Valley()
    pool = records.Pool(model)
    assert gone(pool, optimizers=("soap",))
    winner, made = plan.Search(pool, "soap", 1000).winner(), len(pool.records)
    assert gone(pool, "frequency", rlx_optim.list_optimizers())
    found = [(r["steps"], r["settings"]["precondition_frequency"], r["settings"]["weight_decay"]) for r in pool.records[made:]]
    assert found == [(steps, n, winner["weight_decay"]) for steps, n in [*((250, n) for n in plan.FREQUENCIES), (500, 1)]]
    assert {r["seed"] for r in pool.records[made:]} == {records.TUNING_SEED}
    assert plan.following(pool, "race", ("soap",), 1000) is None


def test_with_newer_bases_the_winner_is_cut_short_while_it_reaches_adamws_loss():
    model, gains = Valley(noise=0.0), {4: 0.08, 2: 0.3}  # one as with 10
    pool, train = records.Pool(model), model.train
    assert gone(pool, optimizers=("adamw", "soap"))
    winner, made = plan.Search(pool, "soap", 1000).winner(), len(pool.records)

    def gaining(name, settings, *more):
        model.gains["soap"] = gains.get(settings.get("precondition_frequency"), 0.0)
        return train(name, settings, *more)

    model.train = gaining
    assert gone(pool, "frequency", ("soap",))
    runs = [r for r in pool.records[made:] if r["seed"] != records.TUNING_SEED]
    lengths = {n: [(r["steps"], r["seed"]) for r in runs if r["settings"]["precondition_frequency"] == n] for n in plan.OFTEN}
    assert lengths == {
        4: [(600, 0), (500, 0), (600, 1), (600, 2)],
        2: [(600, 0), (500, 0), (400, 0), (400, 1), (400, 2)],
        1: [(600, 0), (750, 0)],
    }
    assert all({**r["settings"], "precondition_frequency": 10} == {**winner, "precondition_frequency": 10} for r in runs)
    assert ", precondition_frequency 4, 600 steps" in plan.Job("soap", runs[0]["settings"], 600, 0).describe()


def test_what_diverges_everywhere_is_no_winner():
    model = Valley(best=1e-6)
    model.train = lambda *_: Run(0, [5.0, math.nan], [1.0, 2.0], {}, 0.5, 8, 0, 1, "paper")
    pool = records.Pool(model)
    assert gone(pool)
    assert plan.entries(pool, ["adamw"], 1000) == []
    assert pool.records[0]["loss"] == [None]
    assert "test_loss" not in pool.records[0]


# ---- pieces that add up -------------------------------------------------------------------------------------------------
def test_a_plan_goes_on_where_it_stopped(tmp_path):
    file, whole = tmp_path / records.RUNS, Valley()
    gone(records.Pool(whole))
    times = iter(range(10_000))
    first = Valley()
    assert not gone(records.Pool(first, file=file), seconds=14, clock=lambda: next(times))
    assert 2 < len(first.trained) < len(whole.trained)
    second = Valley()
    assert gone(records.Pool(second, file=file))
    assert first.trained + second.trained == whole.trained
    third = Valley()
    assert gone(records.Pool(third, file=file))
    assert third.trained == []
    assert len(file.read_text().splitlines()) == len(whole.trained)


def test_runs_of_other_sessions_count_and_are_not_written_again(tmp_path):
    gone(records.Pool(Valley(), file=tmp_path / "first.jsonl"))
    model = Valley()
    pool = records.Pool(model, file=tmp_path / "second.jsonl", beside=[tmp_path / "first.jsonl"])
    assert gone(pool)
    assert model.trained == []
    assert not (tmp_path / "second.jsonl").exists()


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"corpus": "another"}, {"model": "another"}, {"engine_asked": "torch"}]
)
def test_runs_under_other_conditions_do_not_count(change, tmp_path):
    gone(records.Pool(Valley(), file=tmp_path / "a.jsonl"))
    lines = [json.dumps(json.loads(line) | change) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert records.Pool(Valley(), beside=[tmp_path / "a.jsonl"]).records == []


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    file = tmp_path / records.RUNS
    gone(records.Pool(Valley(), file=file))
    text = file.read_text()
    file.write_text(text[:-40])
    model = Valley()
    assert gone(records.Pool(model, file=file))
    assert len(model.trained) == 1
    assert len(records.read([file])) == len(text.splitlines())


def test_nothing_is_begun_that_would_not_end_in_time():
    now = [0.0]
    model = Valley()
    slow, train = [], model.train

    def timed(*given):
        now[0] += given[2] * 0.01  # as its runs say of themselves
        slow.append(given)
        return train(*given)

    model.train = timed
    assert not gone(records.Pool(model), seconds=20.0, clock=lambda: now[0])
    assert 10 < now[0] <= 20.0


def test_the_time_of_a_run_is_expected_from_runs_with_as_much_of_the_device(tmp_path):
    slow = Valley()
    train = slow.train
    slow.train = lambda *given: dataclasses.replace(train(*given), seconds=[100.0] * given[2])
    gone(records.Pool(slow, file=tmp_path / "a.jsonl", shared=True), "storage", ("adamw",))
    gone(records.Pool(slow, file=tmp_path / "a.jsonl"), "steps", ("adamw",))
    alone, shared = (records.Pool(Valley(), beside=[tmp_path / "a.jsonl"], shared=shared) for shared in (False, True))
    job = records.Job("adamw", {"lr": 0.1}, 1000, 0)
    assert alone.pace(job) == alone.pace(dataclasses.replace(job, optimizer="lion")) == pytest.approx(100 / 120)
    assert shared.pace(job) == pytest.approx(100 / 500)


def test_the_time_of_a_run_is_expected_from_runs_with_its_settings():
    model, times = Valley(), {1: 0.05, 10: 0.02}
    train = model.train
    model.train = lambda name, settings, steps, *more: dataclasses.replace(
        train(name, settings, steps, *more), seconds=[steps * times.get(settings.get("precondition_frequency"), 0.01)] * steps
    )
    pool = records.Pool(model)
    gone(pool, "steps", ("adamw", "soap"))
    assert pool.records[-1]["settings"]["precondition_frequency"] == 1
    found = {
        n: pool.pace(records.Job("soap", {**pool.records[-1]["settings"], "precondition_frequency": n}, 9, 5)) for n in times
    }
    assert found == pytest.approx(times)
    assert records.Pool(model).pace(records.Job("soap", {}, 9, 5)) == 0.0


def test_an_error_is_told_and_the_others_go_on():
    model, said = Valley(), []
    train = model.train
    model.train = lambda optimizer, *given: dict()["lion"] if optimizer == "lion" else train(optimizer, *given)
    pool = records.Pool(model)
    assert not plan.go(pool, "race", ["lion", "sgd"], 1000, plan.Deadline(None), {}, said.append)
    assert sum("failed: KeyError" in line for line in said) == 4  # three rates, and the cost
    assert {record["optimizer"] for record in pool.records} == {"sgd"}


# ---- statistics -------------------------------------------------------------------------------------------------------
SEEDS = {0: 1.00, 1: 1.02, 2: 0.98, 3: 1.01, 4: 0.99}  # a deviation of 0.0158


def test_a_lead_is_one_only_beyond_the_spread():
    far = leads.lead({0: 0.80, 1: 0.82, 2: 0.78}, SEEDS)
    assert (far.verdict, far.seeds) == ("ahead", 3)
    assert far.mean == pytest.approx(0.2)
    assert far.margin == pytest.approx(2 * math.sqrt(2) * 0.0158114 / math.sqrt(3), rel=1e-4)  # the differences have no spread
    assert leads.lead({0: 1.2, 1: 1.22, 2: 1.18}, SEEDS).verdict == "behind"
    assert leads.lead({0: 0.99, 1: 1.01, 2: 0.97}, SEEDS).verdict == "level"
    uneven = leads.lead({0: 0.5, 1: 1.02, 2: 0.98}, SEEDS)  # one lucky seed
    assert uneven.verdict == "unclear"
    assert uneven.margin == pytest.approx(2 * 0.5 / math.sqrt(3) / math.sqrt(3), rel=1e-6)
    assert leads.lead({0: 1.0, 1: 1.2, 2: 0.9}, SEEDS).verdict == "level"
    assert leads.lead({0: 3.0, 1: 5.0, 2: 4.0}, SEEDS).verdict == "behind"  # far apart, and yet


def test_a_lead_without_a_spread_or_without_equal_seeds_is_not_called_one():
    assert leads.lead({0: 0.5}, {0: 1.0}).verdict == "open"
    assert leads.lead({7: 0.5}, SEEDS) is None
    assert leads.lead({0: 0.9}, SEEDS).verdict == "ahead"  # one seed: beyond what two runs of AdamW differ by
    assert leads.lead({0: 0.96}, SEEDS).verdict == "level"


def test_reached_is_asked_of_equal_seeds():
    runs = {400: {0: 1.1}, 600: {0: 0.99, 1: 1.02}, 750: {0: 0.9}, 800: {7: 0.1}}
    assert leads.reached(runs, SEEDS) == 600  # 1.005 against the 1.01 of the same two
    assert leads.reached(runs, {0: 0.95}) == 750
    assert leads.reached({400: {0: 1.1}, 800: {7: 0.1}}, SEEDS) is None
    assert leads.reached({}, SEEDS) is None
    assert not leads.reaches({0: 1.0}, {})


# ---- the command --------------------------------------------------------------------------------------------------------
def main(*argv):
    return cli.main(["lm-race", *map(str, argv)])


@pytest.fixture
def on_digits(monkeypatch):
    """The digits in place of a language model: nothing needs torch, and a run is short."""
    monkeypatch.setattr(command, "get_model", lambda name: MLP)


def test_a_plan_from_the_command_line(on_digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "COARSE", (1.0,))
    short = ("--plan", "storage", "--optimizers", "lion", "--steps", 8)
    assert main(*short, "--minutes", 0, "--out", tmp_path / "none") == 0
    assert "0 runs made; more to do" in capsys.readouterr().out
    assert main(*short, "--out", tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert said.count("state_dtype int8") == 3
    assert "9 runs made; the plan is done" in said
    assert main(*short, "--out", tmp_path / "a") == 0  # the same folder: nothing left to do
    assert "9 runs known\n0 runs made; the plan is done" in capsys.readouterr().out
    assert main(*short, "--out", tmp_path / "b", "--known", tmp_path / "a", "--shared") == 0
    assert "0 runs made" in capsys.readouterr().out
    (record, *_) = records.read([tmp_path / "a" / records.RUNS])
    assert record["versions"]["rlx_optim"] == rlx_optim.__version__
    assert record["steps"] == 4
    assert record["engine"]


def test_the_report_of_a_plan(on_digits, tmp_path, capsys):
    assert main("--plan", "race", "--optimizers", "adamw", "--steps", 20, "--out", tmp_path) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert not found["interrupted"]
    assert found["optimizers"]["adamw"]["runs"] == 5
    assert found["optimizers"]["adamw"]["curve"]["step"][-1] == 20
    assert len(found["optimizers"]["adamw"]["grid"]) >= 5
    assert "adamw" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--minutes", "3"], ["--plan", "race, cost, storage, steps"]),
        (["--shared"], ["--shared", "--plan"]),
        (["--known", "x.jsonl", "--plan", "race"], ["--known", "x.jsonl"]),
        (["--plan", "rase"], ["'rase'", "did you mean 'race'?"]),
        (["--device", "cuda"], ["'cuda'", "cpu"]),
    ],
)
def test_bad_arguments_are_refused_in_one_line(argv, words, on_digits, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(*argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words)
    assert not any(tmp_path.iterdir())


def test_a_run_comes_back_from_its_record():
    run = MLP.train("lion", rates.SETTINGS["digits-mlp"]["lion"], 20, 3, "reference", quiet)
    pool = records.Pool(MLP, "reference")
    job = records.Job("lion", rates.SETTINGS["digits-mlp"]["lion"], 20, 3)
    back = records.as_run(pool.add(job, run, {}))
    assert back.losses[0] == pytest.approx(sum(run.losses[:10]) / 10, rel=1e-4)
    same = {"losses": [], "seconds": []}
    assert dataclasses.replace(back, **same) == dataclasses.replace(run, **same)
    assert back.seconds[-1] == run.seconds[-1]
    assert len(back.losses) == len(back.seconds) == 20


# ---- gpt ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny(monkeypatch):
    torch = pytest.importorskip("torch")
    from lab.races import gpt

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = gpt.Gpt(gpt.Shape(blocks=1, width=32, heads=2, context=16, rows=4, limit=1_000), "cpu")
    monkeypatch.setattr(gpt, "GPT", made)
    monkeypatch.setattr(gpt, "CHECK", 5)
    yield made
    torch.set_num_threads(threads)


def test_the_gpt_has_25_million_parameters_all_of_them_matrices():
    pytest.importorskip("torch")
    from lab.races import gpt

    with __import__("torch").device("meta"):
        params = dict(gpt.Transformer(gpt.Shape()).named_parameters())
    assert 25e6 < sum(p.numel() for p in params.values()) < 26e6
    assert {p.ndim for p in params.values()} == {2}
    assert gpt.Shape().rows * gpt.Shape().context == 32_768


def test_the_text_is_cut_between_files():
    pytest.importorskip("torch")
    from lab.races import gpt

    text = gpt.corpus()
    parts = [text.test, text.validation, text.learned]
    assert all(part[-1] == 0 for part in parts)
    assert sum(int((part == 0).sum()) for part in parts) >= text.files
    total = sum(map(len, parts))
    assert all(0.04 < len(part) / total < 0.08 for part in parts[:2])
    assert text.digest[:12] in text.describe()


def test_the_gpt_cannot_look_ahead(tiny):
    torch = pytest.importorskip("torch")
    tiny.model.drawn(0)
    x = torch.arange(16)[None] % 96
    changed = x.clone()
    changed[0, 9:] = 5
    one, two = tiny.model(x)[0], tiny.model(changed)[0]
    assert torch.allclose(one[:9], two[:9], atol=1e-5)
    assert not torch.allclose(one[9:], two[9:], atol=1e-5)


def test_positions_matter_only_by_their_difference(tiny):
    torch = pytest.importorskip("torch")
    from lab.races import gpt

    q, k = torch.randn(2, 16)
    cos, sin = tiny.model.cos, tiny.model.sin
    dots = [gpt.rotated(q, cos[a], sin[a]) @ gpt.rotated(k, cos[b], sin[b]) for a, b in ((3, 1), (12, 10), (12, 9))]
    assert torch.allclose(dots[0], dots[1], atol=1e-4)
    assert not torch.allclose(dots[0], dots[2], atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon", "sophia", "schedulefreeadamw"])
def test_the_gpt_learns_and_repeats(tiny, name):
    settings = rates.SETTINGS["gpt"][name]
    heard = []
    run = tiny.train(name, settings, 20, 3, "auto", heard.append)
    again = tiny.train(name, settings, 20, 3, "auto", quiet)
    assert run.losses == again.losses == heard
    assert run.metrics == again.metrics
    assert run.losses[0] == pytest.approx(math.log(256), rel=0.05)  # nothing known: every byte alike
    assert run.losses[-1] < run.losses[0] - 0.3
    assert len(run.seconds) == 20
    assert run.seconds == sorted(run.seconds)
    assert run.state_bytes > 0
    assert tiny.train(name, settings, 1, 4, "auto", quiet).losses[0] != run.losses[0]


def test_what_takes_a_whole_run_is_told_its_steps(tiny):
    settings = rates.SETTINGS["gpt"]["ademamix"]
    whole = {**settings, "alpha_warmup": 12, "beta3_warmup": 12}
    runs = [tiny.train("ademamix", each, 12, 0, "auto", lambda loss: None).losses for each in (settings, whole)]
    assert settings != whole
    assert runs[0] == runs[1]


def test_a_gpt_that_leaves_is_stopped(tiny):
    run = tiny.train("sgd", {"lr": 1e38}, 60, 0, "auto", quiet)
    assert run.diverged_at is not None
    assert run.metrics == {}
    assert len(run.losses) < 60


def test_bfloat16_weights_are_a_model_of_their_own(tiny):
    torch = pytest.importorskip("torch")
    settings = rates.SETTINGS["gpt"]["adamw"]
    whole = tiny.train("adamw", settings, 20, 3, "auto", quiet)
    half = tiny.train("adamw", {**settings, "weights": "bfloat16"}, 20, 3, "auto", quiet)
    assert {p.dtype for p in tiny.model.parameters()} == {torch.bfloat16}
    assert half.losses[0] == pytest.approx(whole.losses[0], abs=0.05)
    assert half.losses[-1] == pytest.approx(whole.losses[-1], abs=0.3)
    assert tiny.train("adamw", settings, 20, 3, "auto", quiet).losses == whole.losses


def test_the_schedule_rises_stays_and_falls():
    pytest.importorskip("torch")
    from lab.races import gpt

    shares = [gpt.share(t, 100) for t in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(shares[4:51]) == {1.0}
    assert shares[75] == pytest.approx(0.5)
    assert shares[99] == pytest.approx(0.02)
    assert gpt.share(99, 100, falls=False) == 1.0


def test_the_gpt_through_the_command_line(tiny, tmp_path, capsys):
    asked = ("--model", "gpt", "--device", "cpu", "--plan", "cost", "--optimizers", "lion,sgd", "--steps", 50)
    assert main(*asked, "--out", tmp_path / "a") == 0
    assert "2 runs made" in capsys.readouterr().out
    (record, *_) = records.read([tmp_path / "a" / records.RUNS])
    assert record["corpus"] == tiny.describe()["corpus"]
    assert record["device"] == "cpu"
    assert record["peak_bytes"] is None


def test_without_a_gpu_the_gpt_is_refused(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    command.get_model("gpt").device = "cuda"
    assert main("--model", "gpt", "--tune") == 2
    assert "--device cpu" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
