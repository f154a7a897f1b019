"""Keys: the tokens of a prompt, what else their content depends on, and the identity of each page of a prefix.

| module | for |
|---|---|
| ``tokens`` | tokens as bytes, their extra keys, and what tells a stretch of them from all others |
| ``pages`` | the identity of a page: a digest of its tokens and of all pages before it |
| ``elements`` | what a tree compares: tokens with numbers in place of extra keys, and with the tokens that follow |
| ``lookahead`` | how far the content of a running sequence is complete where it depends on tokens that follow |

This room alone knows how many bytes a token has (``tokens.TOKEN_BYTES``). It knows no tree, no pool and no component.
Read ``tokens`` first.
"""
