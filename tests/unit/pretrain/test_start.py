import json
from pathlib import Path

import pytest

from trilithon.config import BatchConfig, ResolvedBatch
from trilithon.errors import CheckpointError, ConfigError
from trilithon.pretrain import load_pretrain
from trilithon.pretrain.settings import RunConfig
from trilithon.pretrain.start import Start, find_start, kept_batch, settings_of_run

SAVED = ResolvedBatch(global_size=16, micro_size=8, accumulation=1, data_parallel_size=2)


def a_run(folder: Path, *names: str, checkpoints: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x")
    if checkpoints:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest").write_text("step-00000003")
    return folder


def begin(restarted: bool = False, **settings) -> Start:
    return find_start(RunConfig(**settings), restarted=restarted)


def test_a_new_run_makes_its_folder(tmp_path):
    assert begin(out=tmp_path / "a" / "b") == Start(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_run_continues_in_its_own_folder_whichever_way_it_is_named(tmp_path):
    run = a_run(tmp_path / "run", "config.json", checkpoints=True)
    expected = Start(run, run / "checkpoints", continues=True)
    assert begin(resume=str(run)) == expected
    assert begin(resume=str(run / "checkpoints")) == expected
    assert begin(resume=str(run), out=run) == expected
    assert begin(resume="auto", out=run) == expected
    assert begin(out=run, restarted=True) == expected


def test_another_folder_begins_from_the_checkpoint_and_leaves_the_first_run_alone(tmp_path):
    run = a_run(tmp_path / "run", checkpoints=True)
    assert begin(resume=str(run), out=tmp_path / "new") == Start(tmp_path / "new", run / "checkpoints")
    taken = a_run(tmp_path / "taken", "model.pt")
    with pytest.raises(ConfigError, match=r"taken already holds a run \(model\.pt\)"):
        begin(resume=str(run), out=taken)


def test_a_checkpoint_is_found_without_its_pointer_and_a_single_one_begins_a_new_run(tmp_path):
    single = a_run(tmp_path / "run" / "checkpoints" / "step-00000007", "MANIFEST.json")
    assert begin(resume="auto", out=tmp_path / "run").checkpoints == tmp_path / "run" / "checkpoints"
    assert begin(resume=str(single), out=tmp_path / "new") == Start(tmp_path / "new", single)


def test_auto_begins_anew_where_there_is_no_checkpoint(tmp_path):
    assert begin(resume="auto", out=tmp_path / "new") == Start(tmp_path / "new")
    crashed = a_run(tmp_path / "crashed", "config.json", "metrics.jsonl")
    assert begin(resume="auto", out=crashed) == Start(crashed)
    finished = a_run(tmp_path / "finished", "config.json", "model.pt")
    with pytest.raises(ConfigError, match="already holds a run"):
        begin(resume="auto", out=finished)
    with pytest.raises(ConfigError, match="which run is to be continued is not known"):
        begin(resume="auto")


def test_restarted_ranks_begin_anew_over_their_own_records(tmp_path):
    crashed = a_run(tmp_path / "crashed", "config.json", "metrics.jsonl")
    assert begin(out=crashed, restarted=True) == Start(crashed)
    branched_from = a_run(tmp_path / "run", checkpoints=True)
    assert begin(out=crashed, resume=str(branched_from), restarted=True).checkpoints == branched_from / "checkpoints"
    with pytest.raises(ConfigError, match="not known"):
        begin(restarted=True)


def test_a_folder_that_holds_a_run_is_refused_with_the_way_to_continue(tmp_path):
    run = a_run(tmp_path / "run", "config.json", checkpoints=True)
    with pytest.raises(ConfigError, match=r"--overwrite to replace it, or --resume .*run to continue it"):
        begin(out=run)
    assert begin(out=run, overwrite=True) == Start(run)


@pytest.mark.parametrize(("name", "words"), [("absent", "does not exist"), ("empty", "holds no finished checkpoint")])
def test_nothing_to_continue_from_is_an_error(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=words):
        begin(resume=str(tmp_path / name))


def test_the_settings_of_a_run_are_read_from_its_folder(tmp_path):
    given = {"data.paths": ["texts"], "run.steps": 9, "zero.stage": 3, "run.out": str(tmp_path), "run.resume": "auto"}
    config = load_pretrain(overrides={**given, "run.save_every": 4})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    again = load_pretrain(settings_of_run(tmp_path), {"run.steps": 12})
    assert again.engine == config.engine and again.data == config.data
    assert (again.run.steps, again.run.save_every, again.run.out, again.run.resume) == (12, 4, None, None)
    (tmp_path / "config.json").write_text(json.dumps({"data": {}}))
    with pytest.raises(ConfigError, match="does not hold the settings of a run"):
        settings_of_run(tmp_path)


@pytest.mark.parametrize(
    ("written", "ranks", "micro", "accumulation"),
    [
        ({"micro_size": 8}, 2, 8, 1),  # as it was
        ({"micro_size": 8}, 1, 8, 2),  # half the ranks, twice the micro-batches
        ({"micro_size": 8}, 4, 4, 1),  # more ranks than the micro-batch leaves work for
        ({"micro_size": 3}, 2, 2, 4),  # the largest that fits
        ({}, 1, 8, 2),
        ({"accumulation": 4}, 1, 8, 2),  # accumulation follows
    ],
)
def test_the_global_batch_is_kept_by_accumulation(written, ranks, micro, accumulation):
    batch = kept_batch(BatchConfig(**written), SAVED, ranks).resolve(ranks)
    assert (batch.global_size, batch.micro_size, batch.accumulation) == (16, micro, accumulation)


def test_another_global_batch_is_taken_when_asked_for():
    assert kept_batch(BatchConfig(global_size=32), SAVED, 2).global_size == 32


def test_a_global_batch_that_does_not_split_names_the_ranks_that_do():
    with pytest.raises(ConfigError, match=r"16 sequences a step, .* over 3 ranks.*\(1, 2, 4, 8, 16\)"):
        kept_batch(BatchConfig(), SAVED, 3)
