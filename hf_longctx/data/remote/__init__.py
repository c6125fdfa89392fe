"""The planner-driven loader on Ray: one planner for all ranks, and servers that read what each rank trains on.

    client (each rank)  --(epoch, step, adjustment, rank)-->  server  --(epoch, step, adjustment)-->  planner
                        <--the plan, and this rank's tokens and labels--          <--where the plan lies--

- cluster.py: starts a Ray of this run on the loopback interface, or joins one by its address.
- planner.py: an actor that holds the lengths of all documents and plans each step once.
- server.py: actors that open the data set, read the slices of the ranks that ask them, and nothing else.
- client.py: RemoteSteps, which a rank uses in place of PlannedSteps, and which gives the same RankSteps bit by bit.
- wire.py: what is sent.
- on_the_fly.py: rows that servers tokenise when they are asked for.

Everything is a function of (epoch, step, adjustment). An actor that dies is started again and asked again, so nothing is
lost or repeated. Only this folder imports ray.
"""

try:
    import ray
except ImportError as error:
    raise ImportError(
        "the remote loader needs Ray. Valid: pip install 'hf_longctx[ray]', or the local loader"
    ) from error

del ray
