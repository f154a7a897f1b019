"""A fleet: several replicas of the server behind one address, and which of them answers which request.

Three rooms. ``routing`` says which replica is best for a request, from what is known of each. It knows no process, no
network and no clock, so the other two use the same policies: ``simulation`` replays a trace through replicas that are
real caches without bytes, in virtual time, and ``deploy`` runs real servers on Ray Serve.

Read ``routing.contract`` first.
"""
