"""What two processes do for `test_head_ranks.py`: `python -m tests.policy.head_worker` under a launcher."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lit_rl.policy.head import LogProbHead
from tests.policy.head_oracle import full_scores

TOKENS, WIDTH, VOCABULARY, MICROBATCHES = 13, 8, 17, 2


class Model(nn.Module):
    """A backbone and an output layer; the head runs inside `forward`, and may also be called from outside."""

    def __init__(self, *, checkpointed: bool = False, bias: bool = True, chunk_tokens: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=bias).double()
        self.checkpointed = checkpointed
        self.__dict__["head"] = LogProbHead(self.lm_head, softcap=5.0, chunk_tokens=chunk_tokens)

    def hidden(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.backbone, inputs, use_reentrant=False) if self.checkpointed else self.backbone(inputs)

    def forward(self, inputs: Tensor, targets: Tensor, upstream: Tensor, mode: str = "two_pass") -> Tensor:
        hidden = self.hidden(inputs)
        if mode == "one_pass":
            return self.head.loss(hidden, targets, lambda log_probs, part: upstream[part] * log_probs)[0]
        return (self.head(hidden, targets).log_probs * upstream).sum()


def data(rank: int, microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    inputs = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return inputs, targets, torch.randn(TOKENS, generator=generator, dtype=torch.float64)


def expected_gradients(model: nn.Module, microbatches: int) -> dict[str, Tensor]:
    """The mean over ranks of the summed microbatch gradients, from full logits in this process."""
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(dist.get_world_size()):
        for microbatch in range(microbatches):
            inputs, targets, upstream = data(rank, microbatch)
            logits = model.lm_head(model.backbone(inputs))
            capped = 5.0 * torch.tanh(logits / 5.0)
            picked = capped.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            total = total + (picked * upstream).sum() / dist.get_world_size()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, gradient in found.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, expected[name], rtol=1e-9, atol=1e-11)


def data_parallel() -> None:
    for checkpointed in (False, True):
        for mode in ("two_pass", "one_pass"):
            model = Model(checkpointed=checkpointed)
            expected = expected_gradients(model, MICROBATCHES)
            wrapped = DistributedDataParallel(model)
            with wrapped.no_sync():
                wrapped(*data(dist.get_rank(), 0), mode).backward()
            wrapped(*data(dist.get_rank(), 1), mode).backward()
            assert_gradients(wrapped, expected)


def gathers(run: Callable[[], object]) -> int:
    """Number of all-gather calls that `run` makes."""
    with CommDebugMode() as counted:
        run()
    return sum(count for kind, count in counted.get_comm_counts().items() if "all_gather" in str(kind))


def sharded_inside_forward() -> None:
    """The output layer belongs to the root group: gathered by FSDP2 itself, before forward and at most once more."""
    for mode in ("two_pass", "one_pass"):
        model = Model()
        expected = expected_gradients(model, 1)
        fully_shard(model)
        assert gathers(lambda model=model, mode=mode: model(*data(dist.get_rank(), 0), mode).backward()) <= 2
        assert_gradients(model, expected)


def sharded_on_its_own() -> None:
    """The output layer is a group of its own, which no forward of it ever gathers."""
    for mode in ("two_pass", "one_pass"):
        model = Model(bias=False)
        expected = expected_gradients(model, 1)
        fully_shard(model.lm_head)
        fully_shard(model)
        model(*data(dist.get_rank(), 0), mode).backward()
        assert isinstance(model.lm_head.weight.grad, DTensor)
        assert_gradients(model, expected)


def sharded_outside_forward() -> None:
    """Head called on a sharded weight: one gather per call, whatever the number of chunks, in training and after."""
    inputs, targets, upstream = data(dist.get_rank(), 0)
    for mode in ("two_pass", "one_pass"):
        model = Model(bias=False)
        expected = expected_gradients(model, 1)
        hidden = model.hidden(inputs)
        plain, _ = full_scores(hidden, model.lm_head.weight, targets, softcap=5.0)
        fully_shard(model.lm_head)

        def train(mode: str = mode, model: Model = model, hidden: Tensor = hidden) -> None:
            if mode == "two_pass":
                loss = (model.head(hidden, targets).log_probs * upstream).sum()
            else:
                loss = model.head.loss(hidden, targets, lambda log_probs, part: upstream[part] * log_probs)[0]
            loss.backward()

        assert gathers(train) == 1
        whole = model.lm_head.weight.grad.full_tensor()
        torch.testing.assert_close(whole, expected["lm_head.weight"], rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            assert gathers(lambda model=model, hidden=hidden: model.eval().head(hidden, targets)) == 1
            torch.testing.assert_close(model.head(hidden, targets).log_probs, plain)
            assert model.head.logits(hidden).shape == (TOKENS, VOCABULARY)
        model.lm_head.weight.requires_grad_(False)
        train_hidden = hidden.detach().requires_grad_()
        model.head(train_hidden, targets).log_probs.sum().backward()
        assert train_hidden.grad is not None


def sharded_adapter() -> None:
    """LoRA on a sharded output layer: its parts are gathered too, the frozen weight gets no gradient."""
    model = get_peft_model(Model(bias=False), LoraConfig(r=2, target_modules=["lm_head"])).double().base_model.model
    nn.init.normal_(model.lm_head.lora_B["default"].weight)
    dist.broadcast(model.lm_head.lora_B["default"].weight.data, 0)
    dist.broadcast(model.lm_head.lora_A["default"].weight.data, 0)
    model.__dict__["head"] = LogProbHead(model.lm_head, softcap=5.0, chunk_tokens=4)
    expected = expected_gradients(model, 1)
    inputs, targets, upstream = data(dist.get_rank(), 0)
    hidden = model.hidden(inputs)
    fully_shard(model.lm_head)
    (model.head(hidden, targets).log_probs * upstream).sum().backward()
    assert_gradients(model, expected)


CASES = (data_parallel, sharded_inside_forward, sharded_on_its_own, sharded_outside_forward, sharded_adapter)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for case in CASES:
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{case.__name__}: equal", flush=True)
    dist.destroy_process_group()
