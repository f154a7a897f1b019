"""A fleet: several replicas of the server behind one address, and which of them answers which request.

``routing``     which replica is best for a request, from what is known of each. It knows no process, no network and no
                clock, so that simulated and real fleets use the same policies
``simulation``  a trace through replicas that are real caches without bytes, in virtual time
``knowledge``   what a real router knows of its replicas: from their events, or from what it sent
``deploy``      real servers on Ray Serve
``commands``    ``prefixloom fleet``

Read ``routing.contract`` first.
"""
