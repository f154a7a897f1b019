"""Insight: what a cache tells of itself, and the proof that its books are right.

``explanation`` says why a prompt hit what it hit. ``history`` remembers what was lost and why, so that an explanation
can name it afterwards. ``stats`` and ``figures`` gather counters and sizes. ``debug`` is debug mode: it keeps the books
a second time and compares.

Everything here reads and changes nothing. This room must not know the faces that an engine holds, nor how a cache is
composed.

Read ``debug`` first, to learn what must always be true, then ``explanation``.
"""
