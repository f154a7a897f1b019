"""Deploy: a fleet of real servers, as an application of Ray Serve.

Ray Serve starts processes, watches over them, scales them and replaces them. This room knows how a request gets
through. The ``front`` reads it and asks for a replica. The ``router`` puts the replicas into the order of a routing
policy. A ``replica`` answers with the same application that ``prefixloom serve`` has. No policy is in here, and nothing
of the API.

====================  ==================================================================================
``config``            the file of a fleet, checked
``calls``             what goes from the front to a replica and back
``replica``           one server in a process of its own
``router``            a request router of Ray Serve that asks a routing policy
``deployed_replicas`` the replicas of one deployment, as one process knows them
``prefill``           which replica computes a prompt for another one
``front``             takes requests, and asks again where a replica has died
``figures``           the metrics of all replicas as one text
``application``       from a file to a running application
====================  ==================================================================================

Read ``front`` first.
"""
