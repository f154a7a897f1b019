"""Real engines with our cache inside: environments, tiny models, traffic, and a verdict about the answers.

Nothing in here is collected by pytest: an engine takes 10 to 60 seconds to start. ``python -m tests.engines`` is the
front door. The modules run in two places. ``environment``, ``verdict`` and ``__main__`` run in the project's own
environment. So does ``routers``, which has a front door of its own. ``models``, ``serve_sglang`` and
``serve_vllm`` run in the environment of an engine, as children.
"""
