"""Serving: requests in, tokens out.

- ``engine``      the public face: adds requests, runs steps, handles their results
- ``driving``     what whoever drives an engine may ask of it; whole answers and streams
- ``scheduler``   decides which tokens the next step computes
- ``admission``   the order in which waiting requests are admitted, and whether the pools have the pages for them
- ``guessing``    tokens guessed ahead from the text alone
- ``observers``   tells whoever follows the engine what it does
- ``interrupts``  keeps Ctrl-C from stopping a step halfway

This room plans with numbers and never reads a tensor. It must not know which model runs, nor that other processes
exist. Read ``engine.py`` first.
"""
