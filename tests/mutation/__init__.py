"""Mutants of the product, made at random and by structure, each run against the tests that cover it.

    python -m tests.mutation --count 100 --seed 1 --only core/prefixloom/tree

Read ``sites`` first (what is changed), then ``workshop`` (a warm process that forks a child for each mutant),
``coverage_map`` (which tests run which line), ``trial`` (one mutant and its tests) and ``score`` (areas, bars and
mutants that were judged equivalent). The product must not know that this folder is there.
"""
