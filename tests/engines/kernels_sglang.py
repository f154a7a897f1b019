"""SGLang's kernels for CPUs, in torch: those of speculation and of states.

SGLang takes them from its library ``sgl_kernel``, of which there is no build for CPUs on the package index. SGLang's
scheduler, pools, workers and attention classes are its own and unchanged. Only what they call at the end is this:
plain loops over the requests of a batch, for chains of drafts and for trees.

``plugins_sglang.repair`` puts them in place, for all runs: with SGLang's own cache, with ours, and without one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

CHUNK = 64
"""After so many tokens of a pass SGLang may ask for the state."""


# ---------------------------------------------------------------- attention
def attend(
    query: Tensor, keys: Tensor, values: Tensor, row: Tensor, length: int, scaling: float, window: int,
    tree: Tensor | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Let the last tokens of one request attend, (tokens, heads, width), over its first ``length`` slots in ``row``.

    ``window``: how many tokens each sees; 0 is all. ``tree``: which of the last tokens each of them sees.
    """
    slots = row[:length].long()
    count = query.shape[0]
    at = torch.arange(length - count, length).unsqueeze(1)
    other = torch.arange(length).unsqueeze(0)
    seen = other <= at if causal else torch.ones(count, length, dtype=torch.bool)
    if window > 0:
        seen &= other > at - window
    if tree is not None:
        seen[:, length - count :] = tree
    result: Tensor = functional.scaled_dot_product_attention(
        query.movedim(0, 1).unsqueeze(0),
        keys[slots].to(query.dtype).movedim(0, 1).unsqueeze(0),
        values[slots].to(query.dtype).movedim(0, 1).unsqueeze(0),
        attn_mask=seen,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return result.squeeze(0).movedim(1, 0)


def extend_attention_cpu(
    q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor, keys: Tensor, values: Tensor, k_scale: float,
    v_scale: float, table: Tensor, rows: Tensor, lengths: Tensor, counts: Tensor, starts: Tensor, most: int,
    scaling: float, cap: float, crossing: bool, window: int, encoder: Tensor | None, sinks: Tensor | None,
    trees: Tensor | None, causal: bool,
) -> None:  # fmt: skip
    """Attention of several tokens of each request. Their keys and values lie in the pool already."""
    assert not cap and not crossing and sinks is None, "not among the kernels here"
    beginning = 0
    requests = zip(rows.tolist(), lengths.tolist(), counts.tolist(), starts.tolist(), strict=True)
    for row, length, count, start in requests:
        tree = None
        if trees is not None:
            tree = trees[beginning : beginning + count * count].view(count, count)
            beginning += count * count
        part = slice(start, start + count)
        o[part] = attend(q[part], keys, values, table[row], length, scaling, window, tree, causal)


def decode_attention_cpu(
    q: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float, o: Tensor, k: Tensor | None,
    v: Tensor | None, places: Tensor, scratch: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, scaling: float,
    cap: float, crossing: bool, window: int, encoder: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Write the keys and values of one token of each request, and let it attend."""
    assert not cap and not crossing and sinks is None, "not among the kernels here"
    if k is not None and v is not None:
        keys[places] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[places] = v.view(-1, *values.shape[1:]).to(values.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        o[i : i + 1] = attend(q[i : i + 1], keys, values, table[row], length, scaling, window)


# ---------------------------------------------------------------- speculation
def build_tree_kernel_efficient_cpu(
    parents: Tensor, chosen: Tensor, lengths: Tensor, mask: Tensor, positions: Tensor, index: Tensor,
    next_token: Tensor, next_sibling: Tensor, topk: int, depth: int, count: int, mode: int,
) -> None:  # fmt: skip
    """Link the drafts of each request: token 0 is the last one known, the others follow one of those before them."""
    assert mode == 1, "SGLang asks for the mask of the drafts alone on a CPU"
    batch = lengths.shape[0]
    mask.view(batch, count, count).zero_()
    for request in range(batch):
        picked = chosen[request].tolist()
        parent_of = [-1] * count
        for token in range(1, count):
            above = picked[token - 1] // topk
            parent_of[token] = 0 if not above else 1 + picked.index(int(parents[request, above]))
        for token in range(count):
            at = token
            depth_of = 0
            mask.view(batch, count, count)[request, token, 0] = True
            while at:
                mask.view(batch, count, count)[request, token, at] = True
                depth_of += 1
                at = parent_of[at]
            positions[request * count + token] = int(lengths[request]) + depth_of
            index[request, token] = request * count + token
        for token in range(count - 1, 0, -1):  # the first child is the one with the smallest number
            next_sibling[request, token] = next_token[request, parent_of[token]]
            next_token[request, parent_of[token]] = token


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Follow each request's drafts as long as one of them is what the model says."""
    says = target_predict.flatten()
    for request in range(candidates.shape[0]):
        token, taken = 0, 0
        place = int(retrive_index[request, 0])
        accept_index[request, 0] = place
        while taken + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[request, token])
            while child != -1 and candidates[request, child] != says[place]:
                child = int(retrive_next_sibling[request, child])
            if child == -1:
                break
            predicts[place] = says[place]
            taken += 1
            token, place = child, int(retrive_index[request, child])
            accept_index[request, taken] = place
        accept_token_num[request] = taken
        predicts[place] = says[place]


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    begun = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[begun : begun + end - start].to(table.dtype)
        begun += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    begun = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[begun : begun + end - start] = table[row, start:end].to(slots.dtype)
        begun += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, width: int, topk: int, steps: int
) -> None:
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, slots, width)


def build_draft_decode_metadata_cpu(
    table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int, width: int
) -> Tensor:
    """Return a table with a row for each branch of each request: what is known, and then the branch's own drafts."""
    found = table.new_zeros(len(rows) * topk, width)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            start = length + branch * steps
            found[i * topk + branch, :length] = table[row, :length]
            found[i * topk + branch, length : length + steps] = table[row, start : start + steps]
    return found


def fill_bonus_tokens_cpu(accepted: Tensor, lengths: Tensor, bonus: Tensor, width: int) -> None:
    bonus.copy_(accepted.flatten()[torch.arange(len(lengths)) * width + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, accepted: Tensor, size: int = 0) -> None:
    taken = accept_index.flatten()
    taken = taken[taken > -1].long()
    accepted[: len(taken)] = slots[taken]


def rotate_input_ids_cpu(
    tokens: Tensor, starts: Tensor, counts: Tensor, last: Tensor, places: Tensor | None = None
) -> None:
    """Shift each request's tokens by one, and put ``last`` at the end."""
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if count:
            tokens[start : start + count - 1] = tokens[start + 1 : start + count].clone()
            tokens[start + count - 1 if places is None else int(places[i])] = last.flatten()[i]


# ---------------------------------------------------------------- states
def convolve(inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: Any) -> Tensor:
    """Inputs (channels, tokens) through a causal convolution. ``state`` has what came before, and takes the last."""
    width = weight.shape[-1]
    whole = torch.cat([state[:, -(width - 1) :].to(inputs.dtype), inputs], dim=1)
    state[:, -(width - 1) :] = whole[:, -(width - 1) :].to(state.dtype)
    channels = inputs.shape[0]
    result = functional.conv1d(whole.unsqueeze(0), weight.to(inputs.dtype).unsqueeze(1), bias, groups=channels)[0]
    return functional.silu(result) if activation in ("silu", "swish", True) else result


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
    seq_lens_cpu: Any = None, cache_indices: Any = None, has_initial_state: Any = None, activation: Any = "silu",
    **_: Any,
) -> Tensor:  # fmt: skip
    """Compute a pass over several tokens (channels, tokens) of each request."""
    found = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        part = slice(bounds[i], bounds[i + 1])
        if slot < 0 or bounds[i] == bounds[i + 1]:
            continue
        if not has_initial_state[i]:
            conv_states[slot].zero_()
        found[:, part] = convolve(x[:, part], conv_states[slot], weight, bias, activation)
    return found


def causal_conv1d_update_cpu(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None,
    conv_state_indices: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute a pass over one token (requests, channels)."""
    found = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            found[i] = convolve(x[i].unsqueeze(1), conv_state[slot], weight, bias, activation)[:, 0]
    return found


def fused_gdn_gating_cpu(
    decay: Tensor, a: Tensor, b: Tensor, bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Return how much of the state stays (as a logarithm), and how much of a token enters it."""
    stays = -decay.float().exp() * functional.softplus(a.float() + bias.float(), beta, threshold)
    return stays.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, stays: Tensor, enters: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gated delta rule, token by token. ``state`` (heads, width of values, width of keys) is changed in place.

    Returns what comes out, and the states after each ``CHUNK`` tokens, beginning with the one before all.
    """
    each = v.shape[1] // k.shape[1]
    q, k = (part.float() * (part.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    q = q.repeat_interleave(each, 1) * k.shape[-1] ** -0.5
    k = k.repeat_interleave(each, 1)
    v, stays = v.float(), stays.exp()
    running = state.float().clone()
    found, states = torch.empty_like(v), []
    for token in range(v.shape[0]):
        if token % CHUNK == 0:
            states.append(running.clone())
        running *= stays[token, :, None, None]
        told = torch.einsum("hvk,hk->hv", running, k[token])
        running += torch.einsum("hv,hk->hvk", (v[token] - told) * enters[token, :, None], k[token])
        found[token] = torch.einsum("hvk,hk->hv", running, q[token])
    state.copy_(running)
    return found, states


def chunk_gated_delta_rule_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, initial_state_indices: Tensor,
    cu_seqlens: Tensor, head_first: bool = False, use_qk_l2norm_in_kernel: bool = True, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A pass over several tokens of each request: what comes out, the last states, and those after each chunk."""
    assert use_qk_l2norm_in_kernel and not head_first
    found, chunks = torch.zeros_like(v), []
    bounds, slots = cu_seqlens.tolist(), initial_state_indices.tolist()
    for i, slot in enumerate(slots):
        part = slice(bounds[i], bounds[i + 1])
        result, states = delta_rule(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], initial_state[slot])
        found[0, part] = result.to(v.dtype)
        chunks += states
    return found, initial_state[slots], torch.stack(chunks).unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor, cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True, softplus_beta: float = 1.0, softplus_threshold: float = 20.0,
) -> Tensor:  # fmt: skip
    """Compute a pass over one token of each request."""
    stays, enters = fused_gdn_gating_cpu(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    return chunk_gated_delta_rule_cpu(q, k, v, stays, enters, initial_state_source, initial_state_indices, cu_seqlens)[
        0
    ]


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "swish", residual: Any = None,
    prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Return what comes out of a state's layer, normed and gated."""
    assert residual is None and bias is None
    normed = functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    gate = g.float()
    gated = gate.sigmoid() if activation == "sigmoid" else functional.silu(gate)
    return (normed * gated).to(x.dtype)


def gate_shared_expert(inputs: Tensor, weight: Tensor, shared: Tensor, result: Tensor, *, do_add: bool) -> None:
    """Add the expert that all tokens share, gated, to what the other experts say."""
    gated = (inputs.float() @ weight.float()).sigmoid().unsqueeze(1) * shared.float()
    result.copy_(gated + result.float() if do_add else gated)


def track_states(
    conv: Tensor, states: Tensor, sources: Tensor, mask: Tensor, targets: Tensor, batch: int,
    check_freed_slots: bool = False,
) -> None:  # fmt: skip
    """Copy the states of the requests in ``mask`` to the slots that SGLang keeps for prefixes, in all layers."""
    for source, wanted, target in zip(
        sources.tolist()[:batch], mask.tolist()[:batch], targets.tolist()[:batch], strict=True
    ):
        if wanted:
            conv[:, target] = conv[:, source]
            states[:, target] = states[:, source]


# ---------------------------------------------------------------- their places
SPECULATION = (
    build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu, assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu, build_draft_decode_metadata_cpu,
    fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu, rotate_input_ids_cpu,
)  # fmt: skip
STATES = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
OPERATORS = (
    extend_attention_cpu, decode_attention_cpu, fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu,
)  # fmt: skip


def place() -> None:
    """Put the kernels where SGLang looks for them: its library, torch's operators, and modules that have them."""
    import sgl_kernel
    import sgl_kernel.mamba

    for library, kernels in ((sgl_kernel, SPECULATION), (sgl_kernel.mamba, STATES)):
        for kernel in kernels:
            replace(library, kernel)
    for kernel in OPERATORS:
        setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    fused_norm_gate.rms_norm_gated = rms_norm_gated
    elementwise._launch_fused_gate_sigmoid_mul = gate_shared_expert
    hybrid_linear_attn_backend.track_mamba_states_all_layers = track_states


def replace(library: Any, kernel: Callable[..., Any]) -> None:
    """Put a kernel into the library, and in the place of its stand-in in all modules that were imported before."""
    before = vars(library).get(kernel.__name__)
    setattr(library, kernel.__name__, kernel)
    if before is None:
        return
    for module in [each for name, each in sys.modules.items() if name.startswith("sglang.")]:
        for name, value in list(vars(module).items()):
            if value is before:
                setattr(module, name, kernel)
