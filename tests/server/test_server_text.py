"""Text as it comes: it is cut in front of stop strings, and whole characters come out, however tokens cut them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixloom_engine.server.stops import StopStrings
from prefixloom_engine.threeway.text import ByteTokenizer


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_a_text_ends_in_front_of_its_first_stop_wherever_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    whole, cut = "".join(pieces), StopStrings(stops)
    told = ""
    for piece in pieces:
        told += cut.push(piece)
        assert whole.startswith(told)
    if not cut.met:
        told += cut.end()
    places = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    assert cut.met == bool(places)
    # the first to be complete ends the text; a longer one that began before it may still have been open
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not places:
        assert told == whole
    else:
        assert len(told) in places
        assert min(places) <= len(told) <= min(ends)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_bytes_make_the_same_text_one_by_one(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    as_it_comes = tokenizer.detokenizer()
    assert "".join([*map(as_it_comes.push, tokens), as_it_comes.end()]) == tokenizer.decode(tokens)
