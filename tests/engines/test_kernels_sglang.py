"""The kernels in torch that SGLang runs with on a CPU compute what their models say."""

from __future__ import annotations

import pytest
import torch

from tests.engines import kernels_sglang as kernels
from tests.engines.worlds import strayed

HEADS, VALUE_HEADS, WIDTH = 2, 4, 8


def test_the_delta_rule_is_that_of_transformers_from_any_state_on() -> None:
    """In passes of several tokens for several requests, and then one token at a time."""
    transformers = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    draw = torch.Generator().manual_seed(1)
    lengths, slots = [70, 3], [4, 1]
    bounds = torch.tensor([0, 70, 73])

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    q, k, v = made(1, 73, HEADS, WIDTH), made(1, 73, HEADS, WIDTH), made(1, 73, VALUE_HEADS, WIDTH)
    decay, a, b, bias = made(VALUE_HEADS), made(73, VALUE_HEADS), made(73, VALUE_HEADS), made(VALUE_HEADS)
    pool = made(6, VALUE_HEADS, WIDTH, WIDTH)
    before = pool.clone()
    stays, enters = kernels.fused_gdn_gating_cpu(decay, a, b, bias)
    found, last, chunks = kernels.chunk_gated_delta_rule_cpu(q, k, v, stays, enters, pool, torch.tensor(slots), bounds)
    for i, slot in enumerate(slots):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        wanted, state = transformers.torch_recurrent_gated_delta_rule(
            q[:, part].repeat_interleave(2, 2), k[:, part].repeat_interleave(2, 2), v[:, part], stays[:, part],
            enters[:, part], before[slot].mT.unsqueeze(0), True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(found[:, part], wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[slot], state[0].mT, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, pool[slots])
    assert chunks.shape[1] == sum(-(-length // kernels.CHUNK) for length in lengths)
    torch.testing.assert_close(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
    torch.testing.assert_close(chunks[0, 0], before[4])
    alone = before.clone()
    for token in range(70):
        at = slice(token, token + 1)
        one = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
            decay, bias, q[:, at], k[:, at], v[:, at], a[at], b[at], alone, torch.tensor([4]), torch.tensor([0, 1])
        )
        torch.testing.assert_close(one, found[:, at], atol=1e-4, rtol=1e-4)


def test_a_convolution_goes_on_where_it_ended() -> None:
    """Whole, in two passes, and token by token, for a request that begins anew in a slot that was used."""
    draw = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 9, generator=draw), torch.randn(5, 4, generator=draw)
    states = [torch.randn(3, 5, 3, generator=draw) for _ in range(2)]
    slot = torch.tensor([2])

    def run(part: torch.Tensor, state: torch.Tensor, begun: bool) -> torch.Tensor:
        return kernels.causal_conv1d_fn_cpu(
            part, weight, None, state, torch.tensor([0, part.shape[1]]), None, slot, [begun]
        )

    whole = run(x, states[0], False)
    parts = [run(x[:, :4], states[1], False), run(x[:, 4:6], states[1], True)]
    parts += [
        kernels.causal_conv1d_update_cpu(x[:, at].unsqueeze(0), states[1], weight, None, "silu", slot)[0].unsqueeze(1)
        for at in range(6, 9)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(states[0][2], states[1][2])
    torch.testing.assert_close(whole[:, 0], torch.nn.functional.silu(x[:, 0] * weight[:, 3]))


def test_drafts_are_linked_and_followed_as_a_tree() -> None:
    """Two drafts follow the last token, and two follow the second of them."""
    parents, chosen = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 4, 5]])
    mask, positions = torch.ones(25, dtype=torch.bool), torch.zeros(5, dtype=torch.long)
    index, child, sibling = (torch.full((1, 5), -1) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        parents, chosen, torch.tensor([10]), mask, positions, index, child, sibling, 2, 2, 5, 1
    )
    assert positions.tolist() == [10, 11, 11, 12, 12]
    assert child.tolist() == [[1, -1, 3, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1]]
    assert [[at for at in range(5) if row[at]] for row in mask.view(5, 5).tolist()] == [
        [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4],
    ]  # fmt: skip
    says = torch.tensor([[7, 0, 9, 0, 5]])  # the model follows token 0 by 7, token 2 by 9, token 4 by 5
    predicts, taken, count = torch.zeros(5, dtype=torch.int), torch.full((1, 3), -1), torch.zeros(1, dtype=torch.int)
    kernels.verify_tree_greedy_cpu(predicts, taken, count, torch.tensor([[1, 6, 7, 8, 9]]), index, child, sibling, says)
    assert (taken.tolist(), count.tolist()) == ([[0, 2, 4]], [2])
    assert [int(predicts[at]) for at in (0, 2, 4)] == [7, 9, 5]


def test_a_pass_of_several_tokens_attends_as_one_at_a_time_does() -> None:
    draw = torch.Generator().manual_seed(3)
    keys, values = torch.randn(20, 2, 4, generator=draw), torch.randn(20, 2, 4, generator=draw)
    query = torch.randn(3, 4, 4, generator=draw)
    table = torch.randperm(20, generator=draw)[:12].view(1, 12)
    found = torch.zeros_like(query)
    told = (keys, values, 1.0, 1.0)
    numbers = [torch.tensor([each]) for each in (0, 12, 3, 0)]
    kernels.extend_attention_cpu(
        query, None, None, found, *told, table, *numbers, 3, 0.5, 0.0, False, 0, None, None, None, True
    )
    for at in range(3):
        one = torch.zeros(1, 4, 4)
        kernels.decode_attention_cpu(
            query[at : at + 1], *told, one, None, None, table, found, table, torch.tensor([0]), torch.tensor([10 + at]),
            0.5, 0.0, False, 0, None, None,
        )  # fmt: skip
        torch.testing.assert_close(one[0], found[at])


def test_who_has_more_cached_than_its_world_has_sent_is_named() -> None:
    def answer(name: str, wave: int, world: int, prompt: list[int], cached: int) -> dict[str, object]:
        return {"name": name, "wave": wave, "world": world, "prompt": prompt, "tokens": [9], "cached": cached}

    first, other = answer("a", 0, 0, [1, 2, 3], 0), answer("b", 1, 1, [1, 2, 3, 4], 0)
    assert strayed([first, other, answer("c", 1, 0, [1, 2, 3, 9, 5], 4)]) == []
    assert strayed([first, {**other, "cached": 1}]) == ["b"]
    assert strayed([first, other, answer("c", 1, 0, [1, 2, 5], 3)]) == ["c"]
    assert strayed([answer("d", 0, 0, [1, 2], 1), answer("e", 1, 0, [1, 2], 0)]) == ["d"], "it comes later"
