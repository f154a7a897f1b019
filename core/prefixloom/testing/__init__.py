"""What plugin authors test with: a toy model that runs through a cache, and a witness of what it computed.

Only this package of the core may import pytest, and its modules import torch when they are themselves imported.
"""
