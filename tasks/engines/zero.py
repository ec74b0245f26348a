"""One trainable model under DeepSpeed: ZeRO 0 to 3 behind the few things a learner asks for."""

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from schemas.config import TrainSection
from tasks.models.loading import device
from tasks.models.lora import checkpoint_tensors, merged

MOMENTS = ("exp_avg", "exp_avg_sq")


def _deepspeed() -> Any:
    """DeepSpeed, with a process group of this one process where no launcher has made one.

    Imported late: it takes seconds, and reads DS_ACCELERATOR as it is imported.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    _keep_freed_memory()
    deepspeed.utils.logger.setLevel(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ:
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        # Shared-memory collectives between ranks of one node: 30 s of compilation that a single rank never calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _keep_freed_memory() -> None:
    """Lets glibc reuse freed memory instead of giving it back: activations come and go hundreds of times a step, and
    faulting in fresh pages took a quarter of a step's time. No effect elsewhere."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        libc.mallopt(trim_threshold, -1)
        libc.mallopt(top_pad, 64 << 20)
        libc.mallopt(mmap_max, 0)


class ZeroEngine:
    """A model, AdamW over those of its parameters that want a gradient, and DeepSpeed's engine around them.

    Clipping and skipping use AdamW's own protocol for loss scaling (`grad_scale`, `found_inf`), which works under every
    ZeRO stage and leaves weights and moments untouched, bit for bit, where a step is skipped.
    """

    def __init__(self, module: nn.Module, train: TrainSection, steps: int) -> None:
        """`steps`: optimizer steps that the weights have seen, for Adam's bias correction."""
        deepspeed = _deepspeed()
        self.module = module
        self.stage = train.zero_stage
        self.trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(
            [p for _, p in self.trained],
            lr=0.0,
            betas=train.adam_betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.0,  # DeepSpeed's own default is 1.0
                "zero_optimization": {"stage": self.stage},
                "steps_per_print": 2**62,
            },
        )
        if torch.distributed.get_world_size() == 1 and self.stage == 0:
            self.engine.enable_backward_allreduce = False  # saves three passes over the gradients
        self.steps = steps

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        return self.engine(*inputs, **options)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of a part of the loss; `last` where no other part follows before the step."""
        self.engine.set_gradient_accumulation_boundary(last)
        with torch.autocast(device().type, enabled=False):  # the forward has cast what is to be cast
            self.engine.backward(loss, scale_wrt_gas=False)

    def grad_norm(self) -> float:
        """L2 norm of the accumulated gradient; not finite where the gradient isn't."""
        if self.stage == 0:
            norms = list(torch._foreach_norm([p.grad for _, p in self.trained if p.grad is not None]))
        else:
            from deepspeed.utils import safe_get_full_grad

            norms = [safe_get_full_grad(p).norm() for _, p in self.trained]
        return torch.stack(norms).double().norm().item()

    def step(self, lr: float, grad_norm: float, clip: float) -> None:
        """One optimizer step with the gradient scaled down to norm `clip` where it is larger. Clears the gradient."""
        self._step(lr, max(1.0, grad_norm / clip), skip=False)
        self.steps += 1

    def discard(self) -> None:
        """Clears the gradient; weights and moments stay as they are, bit for bit."""
        self._step(0.0, 1.0, skip=True)

    def _step(self, lr: float, grad_scale: float, skip: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.grad_scale = torch.tensor(grad_scale, device=device())
        self.optimizer.found_inf = torch.tensor(float(skip), device=device())
        self.engine.step()

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """The full parameters, which ZeRO-3 keeps in parts."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield

    def named_tensors(
        self, model: nn.Module, *, aliases: bool = False, adapted: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Every full tensor of `model` (this module or a part of it) by its name in a checkpoint.

        A tied tensor comes once, under its first name, or with `aliases` under each of its names. An adapter is merged
        into the weight it changes, in float32, one tensor at a time; without `adapted` it is left out.
        """
        seen: set[int] = set()
        for name, tensor, layer in checkpoint_tensors(model):
            if id(tensor) in seen and not aliases:
                continue
            seen.add(id(tensor))
            adapter = [*layer.lora_A.parameters(), *layer.lora_B.parameters()] if layer and adapted else []
            with self.gathered([p for p in (tensor, *adapter) if isinstance(p, nn.Parameter)]):
                if adapter:
                    yield name, merged(tensor.detach(), layer)
                else:
                    yield name, tensor.detach().clone() if self.stage == 3 else tensor.detach()

    def full(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Parameters, each whole for as long as it is looked at."""
        for name, parameter in named:
            with self.gathered([parameter]):
                yield name, parameter.detach().clone() if self.stage == 3 else parameter.detach()

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Adam's moments as `exp_avg.<parameter>` and `exp_avg_sq.<parameter>`; none before the first step."""
        if self.steps == 0:
            return
        for name, parameter in self.trained:
            for moment in MOMENTS:
                yield f"{moment}.{name}", self._moment(parameter, moment)

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        if self.stage == 0:
            return self.optimizer.state[parameter][moment]
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, moment)

    def restore_moments(self, stored: dict[str, Tensor]) -> None:
        """Takes the moments of a saved state whose `steps` this engine was made with."""
        if self.steps == 0:
            return
        for held in self._updated():
            self.optimizer.state[held] = {
                "step": torch.tensor(float(self.steps), device=held.device),
                **{moment: torch.zeros_like(held) for moment in MOMENTS},
            }
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.trained:
            for moment in MOMENTS:
                value = stored[f"{moment}.{name}"].to(device())
                if self.stage == 0:
                    self.optimizer.state[parameter][moment].copy_(value)
                else:
                    from deepspeed.utils import safe_set_full_optimizer_state

                    safe_set_full_optimizer_state(parameter, value, moment)

    def _updated(self) -> list[Tensor]:
        """What Adam updates: the parameters, or under ZeRO 1 to 3 the flat partitions they lie in."""
        match self.stage:
            case 0:
                return [p for _, p in self.trained]
            case 1 | 2:
                return self.engine.optimizer.single_partition_of_fp32_groups
            case _:
                return self.engine.optimizer.fp32_partitioned_groups_flat

    def close(self) -> None:
        self.engine.destroy()
