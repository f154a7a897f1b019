"""What one engine hands to another about a prompt: plain data.

``forward.handover`` reads this content from the pools and writes it into them; ``disaggregation.messages`` turns it
into bytes and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class Handover:
    """The content that the receiver of a prompt lacks, and the first token of the answer.

    ``have``      how many tokens of the prompt the receiver has already
    ``boundary``  the last page boundary before ``end``, if the receiver shall be able to resume there as well; 0 where
                  the receiver has that boundary already or has no use for it
    ``end``       where the content ends: the length of the prompt
    ``token``     the token that was sampled after ``end``, and ``logprob`` its log-probability
    ``pages``     by component: the numbers, counted from the beginning of the sequence, of the pages in ``content``
    ``content``   by component and buffer: of pages (layers, pages, *shape of a page), of states (layers, *shape), the
                  states being those at ``end``
    ``states``    by component and buffer: the states at ``boundary``
    ``hit``       how many tokens of the prompt were cached where the rest was computed
    """

    have: int
    boundary: int
    end: int
    token: int
    logprob: float
    pages: Mapping[str, Sequence[int]]
    content: Mapping[tuple[str, str], Tensor]
    states: Mapping[tuple[str, str], Tensor]
    hit: int = 0

    @property
    def size(self) -> int:
        """Bytes of ``content`` and ``states``."""
        return sum(each.numel() * each.element_size() for kind in (self.content, self.states) for each in kind.values())
