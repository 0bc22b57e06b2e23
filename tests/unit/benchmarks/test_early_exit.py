"""A decoder that is left early: its features are those of the whole one, and the read-out is the best linear one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from early_decoding import dc, kl
from early_exit import fit, truncated


def made(kind: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind().eval().requires_grad_(False)


def latents(seed: int = 0, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 4, 4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [kl, dc])
@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_features_are_those_of_the_whole_decoder(kind: Any, divisor: int) -> None:
    whole, seen = made(kind), {}
    block = whole.decoder.up_blocks[{1: 2, 2: 1, 4: 0}[divisor] if kind is kl else {1: 0, 2: 1, 4: 2}[divisor]]
    last = block.resnets[-1] if kind is kl else block
    last.register_forward_hook(lambda module, inputs, output: seen.update(found=output))
    before = whole.decode(latents()).sample
    expected = seen["found"]
    assert torch.equal(truncated(whole, divisor, "end").decode(latents()).sample, expected)
    assert torch.equal(whole.decode(latents()).sample, before)  # which is left as it was


@pytest.mark.parametrize("kind", [kl, dc])
def test_entry_is_right_after_the_upsampling(kind: Any) -> None:
    whole, seen = made(kind), {}
    upsampling = whole.decoder.up_blocks[0].upsamplers[0] if kind is kl else whole.decoder.up_blocks[1][0]
    upsampling.register_forward_hook(lambda module, inputs, output: seen.update(found=output))
    whole.decode(latents())
    expected = seen["found"]
    assert torch.equal(truncated(whole, 2, "entry").decode(latents()).sample, expected)


def test_no_other_read_out_is_closer_on_what_it_was_fitted_to() -> None:
    whole, batch = made(kl), latents(count=4)
    early = fit(whole, 2, "entry", batch.split(2), kernel=1, groups=0)
    wanted = F.avg_pool2d(whole.decode(batch).sample, 2)

    def error() -> float:
        return float((early.decode(batch).sample - wanted).square().mean())

    best, readout = error(), early.decoder.conv_out
    generator = torch.Generator().manual_seed(1)
    fitted = readout.weight
    for _ in range(8):
        readout.weight = fitted + 1e-2 * fitted.abs().mean() * torch.randn(fitted.shape, generator=generator)
        assert error() > best
    assert best < float((wanted - wanted.mean((0, 2, 3), keepdim=True)).square().mean())


def test_a_size_that_the_decoder_does_not_have_is_refused() -> None:
    for divisor, where in ((3, "end"), (8, "end"), (4, "entry")):
        with pytest.raises(ValueError, match=f"cannot be left at 1/{divisor}, {where}"):
            truncated(made(kl), divisor, where)  # type: ignore[arg-type]
