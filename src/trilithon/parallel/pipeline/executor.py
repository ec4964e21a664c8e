"""Runs one stage's order of actions, and moves activations and gradients between stages.

Receives are begun before the computation that precedes their use, sends are never waited for before the end, so
stages wait only for results. A stage that fails goes on through its order without computing: it takes what it is sent
and passes zeros on, so that every other stage comes to the end of the step as well and all can be told there.

torch.distributed.pipelining is not used: it wants all shapes before the first step, one output form for ever, has no
tied layers, and a stage that raises leaves the others waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trilithon.contracts import Handle, Tag
from trilithon.errors import CollectiveError, ProtocolError
from trilithon.parallel.pipeline.schedule import Action, Kind
from trilithon.parallel.pipeline.stage import Stage
from trilithon.parallel.pipeline.travel import Form, take_apart
from trilithon.parallel.pipeline.weights import WeightGradients

T = TypeVar("T")

_AHEAD = 2  # actions whose messages are being received while one computes
_KEPT_FORMS = 256  # of inputs of different shapes
_IN_FLIGHT = 2  # sends that an evaluation does not wait for


class Channel(Protocol):
    """Ordered messages between stages: `comm.messages.Messages`."""

    def send(self, peer: int, tensor: Tensor, tag: Tag) -> Handle: ...

    def receive(self, peer: int, tensor: Tensor, tag: Tag) -> Handle: ...

    def send_object(self, peer: int, value: Any, tag: Tag) -> Sequence[Handle]: ...

    def receive_object(self, peer: int, tag: Tag) -> Any: ...


class Work(Protocol):
    """One pass over some micro-batches, as the engine sees it."""

    step: int
    draw: int | None  # of random numbers; None leaves the generators alone
    key: Hashable  # equal when the shapes of all inputs are; None: not known to be

    def inputs(self, micro: int) -> Any:
        """Of the first stage."""
        ...

    def finish(self, output: Any, micro: int) -> Tensor | None:
        """Of the last stage: the scaled loss of a micro-batch, whose backward follows; None in evaluation."""
        ...

    def backward(self, compute: Callable[[], None]) -> None:
        """Calls `compute`, which runs autograd, and takes care of the gradients of parameters."""
        ...


@dataclass
class _Pass:
    """One micro-batch in one chunk, between its forward and its backward."""

    received: Form | None = None
    leaves: list[Tensor] = field(default_factory=list)  # tensors of `received`
    sent: Form | None = None
    edges: list[GradientEdge] = field(default_factory=list)  # of the outputs whose gradients come back
    loss: Tensor | None = None
    sends: list[Handle] = field(default_factory=list)
    weights: WeightGradients | None = None


@dataclass(frozen=True)
class _Receiving:
    """A value whose tensors are on their way here."""

    form: Form
    tensors: list[Tensor]
    handles: list[Handle]

    def arrived(self) -> list[Tensor]:
        for handle in self.handles:
            handle.wait()
        return self.tensors


class UpstreamError(Exception):
    """Nothing to compute: a stage before this one failed."""


class Executor:
    """stage: what is computed here. activations, gradients: towards the last stage, and back; None for one stage.

    dynamic_shape: shapes may depend on values.
    """

    def __init__(
        self, stage: Stage, activations: Channel | None, gradients: Channel | None, device: torch.device, *,
        dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        self._stage, self._device, self._dynamic = stage, device, dynamic_shape
        self._activations, self._gradients = activations, gradients
        self._before = (stage.plan.stage - 1) % stage.plan.stages
        self._after = (stage.plan.stage + 1) % stage.plan.stages
        self._forms: dict[tuple[Hashable, str, int, int], Form] = {}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._coming: dict[Action, _Receiving] = {}
        self._sends: deque[Handle] = deque()
        self._tolerant = False
        self.failure: Exception | None = None  # of this run; UpstreamError when another stage failed first

    # ---------------------------------------------------------------------------------------------------- the run
    def run(self, order: Sequence[Action], work: Work, *, tolerant: bool) -> None:
        """All actions. tolerant: an exception of a layer is kept in `failure`, and the order is gone through."""
        self.failure, self._tolerant = None, tolerant
        self._passes.clear()
        self._coming.clear()
        for index, action in enumerate(order):
            self._receive_ahead(order[index : index + 1 + _AHEAD], work)
            if action.kind is Kind.FORWARD:
                self._forward(action, work)
            elif action.kind is Kind.WEIGHT:
                self._weights(action, work)
            else:
                self._backward(action, work)
        for one in self._passes.values():
            self._sends.extend(one.sends)
        self._passes.clear()
        while self._sends:
            self._sends.popleft().wait()

    def forget_forms(self) -> None:
        """After a failure: what the stages know of each other may differ."""
        self._forms.clear()

    def _guarded(self, compute: Callable[[], T]) -> T | None:
        """What computes something; None when it fails, or when this stage or one before it has failed."""
        if self.failure is not None:
            return None
        try:
            return compute()
        except CollectiveError:
            raise
        except Exception as error:
            if not self._tolerant:
                raise
            self.failure = error
            return None

    # ----------------------------------------------------------------------------------------------------- forward
    def _forward(self, action: Action, work: Work) -> None:
        here = self._passes[action.chunk, action.micro] = _Pass()
        if not self._stage.is_first(action.chunk):
            self._take_activations(action, work, here)
        if self._stage.is_last(action.chunk):
            here.loss = self._guarded(lambda: work.finish(self._output(action, work, here), action.micro))
            return
        made = self._guarded(lambda: self._checked(action, work, take_apart(self._output(action, work, here))))
        self._send_activations(action, work, here, *(made or (None, [])))

    def _output(self, action: Action, work: Work, here: _Pass) -> Any:
        if self._stage.is_first(action.chunk):
            x = work.inputs(action.micro)
        else:
            assert here.received is not None
            if torch.is_grad_enabled():
                for leaf, shape in zip(here.leaves, here.received.shapes, strict=True):
                    leaf.requires_grad_(shape.needs_grad)
            x = here.received.build(here.leaves)
        return self._stage.run(action.chunk, x, work.draw, action.micro)

    def _checked(self, action: Action, work: Work, made: tuple[Form, list[Tensor]]) -> tuple[Form, list[Tensor]]:
        known, (form, tensors) = self._form("out", action, work), made
        if known is not None and form != known:
            raise ProtocolError(
                f"stage {self._stage.plan.stage} made {_told(form)} for micro-batch {action.micro}, and {_told(known)} "
                "before from inputs of the same shapes. Pass dynamic_shape=True to PipelineModule (or set "
                "pipeline.dynamic_shape) when what travels between stages depends on values."
            )
        here = self._passes[action.chunk, action.micro]
        here.edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        return form, tensors

    def _take_activations(self, action: Action, work: Work, here: _Pass) -> None:
        """`received` stays None when a stage before has failed and this one does not know what it would have got."""
        if action not in self._coming:
            form = self._form("in", action, work)
            if form is None:
                assert self._activations is not None
                form = self._activations.receive_object(self._before, self._tag(self._before, work, action))
                if form is None:
                    self.failure = self.failure or UpstreamError()
                    return
                self._learn("in", action, work, form)
            self._post_activations(action, work, form)
        coming = self._coming.pop(action)
        here.received, here.leaves = coming.form, coming.arrived()

    def _send_activations(
        self, action: Action, work: Work, here: _Pass, form: Form | None, tensors: Sequence[Tensor]
    ) -> None:
        """form: None to say that there is nothing to send: zeros go where something is awaited."""
        assert self._activations is not None
        known, tag = self._form("out", action, work), self._tag(self._stage.plan.stage, work, action)
        handles: list[Handle] = []
        if known is None:
            handles += self._activations.send_object(self._after, form, tag)
            if form is not None:
                self._learn("out", action, work, form)
        elif form is None:
            form, tensors = known, [shape.zeros(self._device) for shape in known.shapes]
        here.sent = form
        handles += [self._activations.send(self._after, t.detach().contiguous(), tag) for t in tensors if t.numel()]
        if torch.is_grad_enabled():
            here.sends = handles
            return
        self._sends.extend(handles)
        while len(self._sends) > _IN_FLIGHT:
            self._sends.popleft().wait()

    # ---------------------------------------------------------------------------------------------------- backward
    def _backward(self, action: Action, work: Work) -> None:
        here = self._passes[action.chunk, action.micro]
        grads = self._take_gradients(action, work, here)
        if action.kind is Kind.INPUT:
            here.weights = WeightGradients()
        self._guarded(lambda: self._run_backward(work, here, grads))
        self._send_gradients(action, work, here)
        here.leaves, here.received, here.loss = [], None, None
        if action.kind is Kind.BACKWARD:
            del self._passes[action.chunk, action.micro]

    def _run_backward(self, work: Work, here: _Pass, grads: Sequence[Tensor]) -> None:
        def compute() -> None:
            loss, here.loss, edges, here.edges = here.loss, None, here.edges, []
            if loss is not None:
                loss.backward()
            elif edges:
                torch.autograd.backward(edges, grads)

        if here.weights is None:
            work.backward(compute)
            return
        with here.weights.collected():
            work.backward(compute)

    def _take_gradients(self, action: Action, work: Work, here: _Pass) -> list[Tensor]:
        """Of what this stage sent on."""
        if here.sent is None:
            self._sends.extend(here.sends)
            here.sends = []
            return []
        if action not in self._coming:
            self._post_gradients(action, work, here.sent)
        grads = self._coming.pop(action).arrived()
        for handle in here.sends:  # whoever sends the gradient has received the value
            handle.wait()
        here.sends = []
        return grads

    def _send_gradients(self, action: Action, work: Work, here: _Pass) -> None:
        for shape, leaf in zip(here.received.shapes if here.received is not None else (), here.leaves, strict=True):
            if shape.needs_grad and 0 not in shape.size:
                assert self._gradients is not None
                value = leaf.grad.contiguous() if leaf.grad is not None else shape.zeros(self._device)
                tag = self._tag(self._stage.plan.stage, work, action)
                self._sends.append(self._gradients.send(self._before, value, tag))

    def _weights(self, action: Action, work: Work) -> None:
        waiting = self._passes.pop((action.chunk, action.micro)).weights
        if waiting is not None:
            self._guarded(lambda: work.backward(waiting.compute))

    # ---------------------------------------------------------------------------------------------------- receiving
    def _receive_ahead(self, coming: Sequence[Action], work: Work) -> None:
        """Begin receives whose shapes are known, in order, up to the first whose shapes are not."""
        for action in coming:
            if action in self._coming or action.kind is Kind.WEIGHT:
                continue
            if action.kind is Kind.FORWARD:
                if self._stage.is_first(action.chunk):
                    continue
                form = self._form("in", action, work)
                if form is None:
                    return
                self._post_activations(action, work, form)
            elif not self._stage.is_last(action.chunk):
                here = self._passes.get((action.chunk, action.micro))
                if here is None or here.sent is None:
                    return
                self._post_gradients(action, work, here.sent)

    def _post_activations(self, action: Action, work: Work, form: Form) -> None:
        assert self._activations is not None
        tag = self._tag(self._before, work, action)
        tensors = [shape.empty(self._device) for shape in form.shapes]
        handles = [self._activations.receive(self._before, tensor, tag) for tensor in tensors if tensor.numel()]
        self._coming[action] = _Receiving(form, tensors, handles)

    def _post_gradients(self, action: Action, work: Work, sent: Form) -> None:
        assert self._gradients is not None
        tag = self._tag(self._after, work, action)
        tensors = [shape.zeros(self._device) for shape in sent.shapes if shape.needs_grad]
        handles = [self._gradients.receive(self._after, tensor, tag) for tensor in tensors if tensor.numel()]
        self._coming[action] = _Receiving(sent, tensors, handles)

    # -------------------------------------------------------------------------------------------------------- forms
    def _form(self, way: str, action: Action, work: Work) -> Form | None:
        """What is known of a message into or out of a chunk; None when it will say so itself."""
        return self._forms.get((work.key, way, action.chunk, action.micro))

    def _learn(self, way: str, action: Action, work: Work, form: Form) -> None:
        """Both ends of a message learn and forget alike, since they see the same sequence of them."""
        if self._dynamic:
            return
        self._forms[work.key, way, action.chunk, action.micro] = form
        for old in [key for key in self._forms if key[1] == way][:-_KEPT_FORMS]:
            del self._forms[old]

    def _tag(self, source: int, work: Work, action: Action) -> Tag:
        what = "activations" if action.kind is Kind.FORWARD else "gradients"
        return Tag(f"{what} of stage {source}", step=work.step, micro_step=action.micro)


def _told(form: Form) -> str:
    shapes = [f"{str(s.dtype).removeprefix('torch.')} {list(s.size)}" for s in form.shapes]
    return ", ".join(shapes) or "no tensor"
