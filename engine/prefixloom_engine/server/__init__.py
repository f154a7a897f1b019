"""The server: the engine behind the HTTP interface of OpenAI, for many clients at once.

It knows HTTP, text and tenants; it must not know a component, a tree or a model's layers. One thread drives the engine
(``worker``), and the event loop of uvicorn serves the clients. The two share nothing but the calls of
``EngineWorker``. Read ``app`` first.

====================  ==================================================================================
``command``           ``prefixloom serve``: from the command line to a running server
``app``               the routes, limits and errors
``answers``           from what a client asks to requests of the engine, and from their tokens to text
``endpoints``         what clients ask at one path, and the objects in which they are answered
``reading``           from a body to tokens, in processes apart
``protocol``          what bodies have in common, and errors
``stops``             stop strings
``connection``        what a client may do with a connection
``access``            keys, tenants, and the namespaces of what they ask
``admin``             what an administrator may ask, over HTTP and from the command line
``worker``            the thread that drives the engine
====================  ==================================================================================
"""
