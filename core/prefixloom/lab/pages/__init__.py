"""Pages of what the lab has measured, each one HTML file that is read without a network.

This room draws numbers. It must not know how they were measured.

Read ``report`` first: what stands on a page. ``charts`` draws its pictures.
"""
