"""Routing: which replica answers a request. It knows no process, no network and no clock."""
