"""prefixloom as SGLang's prefix cache: ``--radix-cache-backend prefixloom``. docs/sglang.md says how to use it.

| file | idea |
|---|---|
| ``door`` | what SGLang calls when it starts: registration, and what is refused or left to SGLang's own cache |
| ``interface`` | which names of SGLang the adapter uses, checked when it starts |
| ``composition`` | from SGLang's model config and pools to the books: a cache without memory, of SGLang's slots |
| ``prefix`` | what SGLang holds as a tree node: a match plan, and its leases |
| ``cache`` | SGLang's ``BasePrefixCache`` over the books: match, checkpoint, evict, lock |
| ``slots`` | page numbers of full attention and windows, and SGLang's allocators of them |
| ``states`` | slots of Mamba and linear states, and SGLang's pool of them |
| ``events`` | SGLang's KV events, from the journal of the books |
| ``metrics`` | why prompts missed, as a counter among SGLang's metrics |
| ``audit`` | debug mode: every slot has one owner, on both sides |

Read ``cache`` first. SGLang keeps the free lists, the tables of running requests and all memory. The books know which
slots are cached, for which tokens, and who is reading them.

Only ``door`` is imported by an entry point, and it imports nothing of SGLang until it is called.
"""
