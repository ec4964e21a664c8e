"""One training run on one rank, from files to a report. `run` is what every rank calls.

What only one process may do (tokenising, making the folder, writing results) is done by one and its outcome, or its
error, is known on all; everything else is the same code on every rank.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn

import trilithon
from trilithon import zero
from trilithon.comm.collectives import Group
from trilithon.comm.mesh import init_distributed, make_mesh, own_process_group
from trilithon.config import Config, MonitorConfig, ResolvedBatch
from trilithon.data import Loader, TextCorpus, TokenBlocks, prepare_text
from trilithon.engine.build import is_hopeless
from trilithon.engine.engine import Engine
from trilithon.engine.monitor import Monitor
from trilithon.engine.random_state import derive_random_states
from trilithon.errors import CheckpointError, ConfigError, TrilithonError
from trilithon.models import GPT
from trilithon.parallel.moe import load_report
from trilithon.pretrain.agreement import Agreement
from trilithon.pretrain.artifacts import save_model, with_tied_names, write_whole
from trilithon.pretrain.evaluate import held_out_loss, sample_text
from trilithon.pretrain.interrupt import SaveRequest, StopRequest
from trilithon.pretrain.loop import TrainLoop, call_with_targets
from trilithon.pretrain.past import Past, about_data, find_past
from trilithon.pretrain.progress import Display, human_count, make_display
from trilithon.pretrain.records import take_back
from trilithon.pretrain.report import Report, draw_curve, print_report
from trilithon.pretrain.saving import Saver
from trilithon.pretrain.settings import EVAL_BATCH, PretrainConfig
from trilithon.pretrain.start import CHECKPOINTS, CONFIG, CURVE, SAMPLE, find_start, kept_batch, results_in

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set for each rank by torch's elastic agent


def run(config: PretrainConfig) -> Report:
    """Train as told; returns the same report on every rank.

    With the variables that torchrun sets, one of several ranks; without them, alone. A first Ctrl-C or SIGTERM ends the
    run after the step in progress with a checkpoint, and shows in `Report.exit_status`.
    Raises DataError, ConfigError or CheckpointError for what cannot be done, and NonFiniteError for a loss that is not
    finite, on every rank alike.
    """
    return _Job(config).run()


class _Job:
    """What is fixed before the first step: ranks, folder, data, shapes and sizes."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        comm = config.engine.comm
        distributed = init_distributed(comm.backend, comm.timeout_s)
        # Without a watchdog: tokenising may keep rank 0 busy for longer than ranks wait for each other in training.
        group = Group(own_process_group(make_mesh()) if distributed else None, name="pretrain")
        self.agreement = Agreement(group)
        axes = config.engine.mesh.axes(self.agreement.world_size)
        # ranks that share a batch: those of one data rank
        self.data_rank, self.data_size = axes.index("data", self.agreement.rank), axes.size("data")
        self.stages = axes.size("pipe")
        self.restarts = self.agreement.largest(int(os.environ.get(RESTARTS, "0")), "pretrain.restarts")
        self.start = self.agreement.on_first_rank(
            lambda: find_start(config.run, restarted=self.restarts > 0), "pretrain.folder"
        )
        self.out = self.start.out
        try:
            self._settle()
        except TrilithonError:
            if self.agreement.rank == 0:
                with suppress(OSError):  # not ours if something is in it
                    self.out.rmdir()
            raise

    def _settle(self) -> None:
        """Data, shapes and sizes; only when all of them fit is the folder marked as that of a run."""
        config = self.config
        manifest = self.agreement.on_first_rank_of_host(lambda: _prepare(config), "pretrain.prepare_text")
        self.corpus = TextCorpus.open(manifest)
        self.shape = config.model.shape(self.corpus.manifest.vocab_size)
        self.train = TokenBlocks(self.corpus.train, self.shape.context)
        self.held_out = TokenBlocks(self.corpus.held_out, self.shape.context)
        found = self.agreement.on_first_rank(lambda: find_past(self.start), "pretrain.checkpoint")
        self.tag: str | None = found[0] if found is not None else None
        self.past: Past | None = found[1] if found is not None else None
        ranks, written = self.data_size, config.engine.batch
        if self.past is not None:
            self.past.require_data(about_data(self.corpus.manifest))
            self.past.require_steps(config.run.steps)
            written = kept_batch(written, self.past, ranks)
        self.batch = written.resolve(ranks)
        self.agreement.on_first_rank(self._open_folder, "pretrain.folder")

    def _open_folder(self) -> None:
        """Room for the weights is asked for now: after the last step it would be too late."""
        needed = (4 if self.config.engine.precision.kind == "fp32" else 2) * self.shape.num_parameters()
        try:
            if self.past is not None and self.start.continues:
                take_back(self.out, self.past.step)
            else:
                for path in results_in(self.out):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            free = shutil.disk_usage(self.out).free
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be used ({error.strerror}). Give another folder.") from error
        if free < needed:
            raise CheckpointError(
                f"The disk of {self.out} has {free:,} bytes free, and the weights at the end take {needed:,}. Free "
                "some space or give another folder with --out."
            )
        data = self.config.data
        absolute = data.model_copy(update={"paths": tuple(os.path.abspath(path) for path in data.paths)})
        text = self.config.model_copy(update={"data": absolute}).model_dump_json(indent=1).encode()
        write_whole(self.out / CONFIG, lambda stream: stream.write(text))

    def run(self) -> Report:
        torch.manual_seed(self.config.engine.seed)
        # At stage 3 no rank ever holds the whole model, not even while it is built.
        told = self.config.engine
        folder = told.offload.path if told.offload.parameters == "disk" else None
        with zero.init(enabled=told.zero.stage == 3, backend=told.comm.backend, path=folder):
            model = GPT(self.shape)
        engine = trilithon.initialize(model, config=_engine_config(self.config.engine, self.batch))
        # What draws from the global generators from here on differs between ranks, and is saved for each of them.
        derive_random_states(self.config.engine.seed, 0, self.data_rank)
        written = self.config.engine.monitor.model_dump()
        # quiet: lines are left to the display, which also has a live form
        settings = MonitorConfig(**{**written, "folder": self.out, "quiet": True})
        first_step = self.past.step + 1 if self.past is not None else 1
        monitor = Monitor(settings, rank=self.agreement.rank, details=engine.memory, first_step=first_step)
        display = make_display(
            self.config.run.steps, every=settings.every, rank=self.agreement.rank, quiet=written["quiet"]
        )
        loop = self._loop(engine, monitor, display)
        try:
            display.say(self._opening())
            self._continue(engine, loop, display)
            with StopRequest(on_termination=self.config.run.save_on_signal, hopeless=is_hopeless) as request:
                loop.run(request)
            if not loop.stopped_by:
                loop.measure(loop.done)
            loop.saver.finish()
            display.say(self._closing(loop))
            if self.stages > 1 and self.config.run.sample_tokens:
                display.say("No sample is drawn from stages: load the weights of the finished run for that.")
        finally:
            display.close()
            monitor.close()
        report = self._report(engine, loop)
        if loop.stopped_by != signal.SIGTERM:  # who sends that does not wait for long
            self._leave_results(engine, loop, report)
        # at stage 3 and with experts over ranks no rank may have room for all of it
        engine.close(give_back=self.config.engine.zero.stage < 3 and not self.shape.experts)
        if self.agreement.rank == 0 and not written["quiet"]:
            print_report(report, Console())
        return report

    def _continue(self, engine: Engine, loop: TrainLoop, display: Display) -> None:
        """Take up everything that the checkpoint holds, where there is one."""
        engine.stateful.update({"loader": loop.loader, "run": loop})
        if self.restarts:
            display.say(f"Start {self.restarts + 1} of these ranks, after a failure.")
        if self.start.checkpoints is None or self.past is None:
            return
        engine.load(self.start.checkpoints, tag=self.tag)
        loop.share_history()
        ranks, then = self.agreement.world_size, self.past
        changed = "" if then.world_size == ranks else f", which ran on {then.world_size}"
        display.say(
            f"Continuing after step {loop.done} of {self.start.checkpoints}{changed}: {self.batch.global_size} "
            f"sequences a step as {self.batch.accumulation} x {self.batch.micro_size} on each of {ranks} ranks"
        )

    def _loop(self, engine: Engine, monitor: Monitor, display: Display) -> TrainLoop:
        agreement, run = self.agreement, self.config.run
        return TrainLoop(
            engine=engine,
            loader=Loader(
                self.train,
                self.batch.micro_size,
                rank=self.data_rank,
                world_size=self.data_size,
                seed=self.config.engine.seed,
                num_workers=self.config.data.workers,
            ),
            agreement=agreement,
            monitor=monitor,
            display=display,
            forward=None if self.stages > 1 else call_with_targets,
            validate=lambda: held_out_loss(
                lambda inputs, targets: self._loss(engine, inputs, targets),
                self.held_out,
                agreement,
                part=(self.data_rank, self.data_size),
                micro_size=self.batch.micro_size,
                max_sequences=run.eval_batches * EVAL_BATCH,
                device=engine.device,
            ),
            steps=run.steps,
            accumulation=self.batch.accumulation,
            eval_every=run.eval_every,
            show_every=self.config.engine.monitor.every,
            saver=Saver(
                engine=engine,
                folder=self.out / CHECKPOINTS,
                every=run.save_every,
                on_signal=run.save_on_signal,
                steps=run.steps,
                client_state=self._about,
                say=display.say,
            ),
            asked_outside=SaveRequest.from_environment().take if agreement.rank == 0 else lambda: False,
            load=lambda: load_report(engine.module),
        )

    def _loss(self, engine: Engine, inputs: Tensor, targets: Tensor) -> Any:
        """Of a batch in evaluation, on this rank's data."""
        if self.stages > 1:
            return engine.eval_step([(inputs, targets)], own_data=True)
        return engine.eval_step((inputs, targets), call_with_targets)

    def _about(self, step: int) -> dict[str, Any]:
        """What a checkpoint of this run says about it."""
        batch, ranks = self.batch, self.data_size
        past = Past(step, batch.global_size, batch.micro_size, ranks, about_data(self.corpus.manifest))
        return past.client_state()

    def _report(self, engine: Engine, loop: TrainLoop) -> Report:
        run, manifest = self.config.run, self.corpus.manifest
        sample = ""
        if run.sample_tokens and not loop.stopped_by and self.stages == 1:  # a stage cannot write text by itself
            sample = sample_text(
                cast(GPT, engine.module),
                self.corpus,
                prompt=run.prompt,
                num_tokens=run.sample_tokens,
                temperature=run.temperature,
                top_k=run.top_k,
                seed=self.config.engine.seed,
                device=engine.device,
            )
        return Report(
            out=self.out,
            steps=loop.done,
            tokens=loop.done * self.batch.global_size * self.shape.context,
            seconds=loop.seconds,
            num_parameters=self.shape.num_parameters(),
            flops_per_token=self.shape.training_flops_per_token(),
            train_loss=loop.recent_loss(),
            validation_loss=math.nan if loop.stopped_by else loop.history.validation[-1][1],
            unigram_entropy=manifest.unigram_entropy,
            bytes_per_token=manifest.train_bytes / manifest.train_tokens,
            memory=loop.memory,
            world_size=self.agreement.world_size,
            sample=sample,
            exit_status=128 + loop.stopped_by if loop.stopped_by else 0,
        )

    def _leave_results(self, engine: Engine, loop: TrainLoop, report: Report) -> None:
        """Weights, curve and sample on rank 0; an error there is raised on every rank."""
        weights: dict[str, Tensor] = {}
        for name, whole in engine.view("param"):  # collective, one at a time: only rank 0 needs room for all of them
            if self.agreement.rank == 0:
                weights[name] = whole.cpu()

        def write() -> None:
            save_model(self.out, with_tied_names(weights, self._whole(engine)), self.shape, self.corpus.tokenizer)
            draw_curve(loop.history, report.unigram_entropy, self.out / CURVE)
            if report.sample:
                write_whole(self.out / SAMPLE, lambda stream: stream.write(report.sample.encode()))

        self.agreement.on_first_rank(write, "pretrain.results")

    def _whole(self, engine: Engine) -> nn.Module:
        """A model with all names, of which no values are read."""
        if self.stages == 1:
            return engine.module
        with torch.device("meta"):
            return GPT(self.shape)

    def _closing(self, loop: TrainLoop) -> str:
        if not loop.stopped_by:
            if self.past is not None and self.past.step == loop.done:
                return f"Nothing to train: all {loop.done} steps were done before. Give a larger --steps to go on."
            return f"Done after step {loop.done}."
        saved = f" Continue it with: trilithon train --resume {self.out}" if loop.saver.saved == loop.done else ""
        return f"Stopped after step {loop.done} as asked.{saved}"

    def _opening(self) -> str:
        manifest, ranks = self.corpus.manifest, self.agreement.world_size
        return (
            f"{human_count(manifest.train_tokens)} training and {human_count(manifest.held_out_tokens)} held-out "
            f"tokens from {manifest.num_files} files ({manifest.tokenizer}, vocabulary {manifest.vocab_size}); "
            f"{human_count(self.shape.num_parameters())} parameters on {ranks} rank{'s' * (ranks > 1)}, "
            f"ZeRO stage {self.config.engine.zero.stage}, {self.config.engine.precision.kind}; "
            f"{self.batch.global_size} sequences of {self.shape.context} tokens a step"
        )


def _prepare(config: PretrainConfig) -> Path:
    data = config.data
    return prepare_text(
        data.paths,
        cache=data.cache or default_cache(),
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        suffixes=data.suffixes,
        held_out=data.held_out,
        max_tokens=data.max_tokens,
    )


def default_cache() -> Path:
    """trilithon/tokens under XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trilithon" / "tokens"


def _engine_config(config: Config, batch: ResolvedBatch) -> Config:
    """The engine's own part: recording is the run's affair, and the batch has been settled for these ranks."""
    sizes = {f"batch.{name}": getattr(batch, name) for name in ("global_size", "micro_size", "accumulation")}
    monitor = {"monitor.folder": None, "monitor.quiet": True, "monitor.profile_step": None}
    return Config.load(config, overrides={**sizes, **monitor})
