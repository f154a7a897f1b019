"""Tenants: who of several comes next, whose request is set back, and what each may run beside what others keep.

All is counted in running requests and in tokens that were computed, divided by a tenant's share, and never in seconds.
A tenant that is alone has everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prefixloom import Cache, Figure, owner_of

from ..forward.jobs import Job
from .admission import PageBudget

WANTED_SECONDS = 600.0
"""What an owner keeps within its share is protected from the running requests of others, until it has asked nothing for
so long."""


class Tenants:
    """The tenants of one engine. ``shares``: by tenant; who is not there has 1.

    ``served``  by tenant, the tokens that were computed for it. Who comes back begins with what the tenants have that
                are there, so that nobody saves turns up
    """

    def __init__(self, shares: Mapping[str, float], cache: Cache, budget: PageBudget) -> None:
        self._shares, self._cache, self._budget = dict(shares), cache, budget
        self.served: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        """By owner, when it asked last."""

    def share(self, tenant: str) -> float:
        return self._shares.get(tenant, 1.0)

    def came(self, job: Job, there: Iterable[Job], now: float) -> None:
        """Note that ``job`` comes; ``there`` are the jobs that have not ended."""
        tenant, others = job.request.tenant, {other.request.tenant for other in there}
        if tenant not in others:
            least = min((self.served[other] / self.share(other) for other in others), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least * self.share(tenant))
        if self._cache.composition.policy.shares is not None:
            self._asked[owner_of(job.namespace)] = now

    # ------------------------------------------------------------ whose turn
    def by_served(self, tenant: str) -> float:
        return self.served[tenant] / self.share(tenant)

    def by_running(self, running: Collection[Job]) -> Callable[[str], tuple[float, float]]:
        """Return the order of admission: first who runs least, and of these who was served least."""
        return lambda tenant: (self.load(running, tenant, of_one), self.by_served(tenant))

    def turns(self, jobs: Iterable[Job], order: Callable[[str], object]) -> Iterator[Job]:
        """Yield ``jobs``, each time one of the tenant that is first by ``order`` then. One keeps its order."""
        queues: dict[str, deque[Job]] = {}
        for job in jobs:
            queues.setdefault(job.request.tenant, deque()).append(job)
        while queues:
            tenant = min(queues, key=order) if len(queues) > 1 else next(iter(queues))  # type: ignore[arg-type]
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    # ------------------------------------------------------------ who runs too much
    def load(self, running: Iterable[Job], tenant: str, measure: Callable[[Job], int]) -> float:
        return sum(measure(job) for job in running if job.request.tenant == tenant) / self.share(tenant)

    def most(self, running: Collection[Job], measure: Callable[[Job], int]) -> str:
        """Return the tenant that runs most for its share."""
        return max({job.request.tenant: 0 for job in running}, key=lambda each: self.load(running, each, measure))

    def gives_way(self, job: Job, ranked: list[Job], measure: Callable[[Job], int]) -> Job | None:
        """Return the running job to set back for ``job``: the last one of the other tenant that runs most after that.

        None: each would then run less than the tenant of ``job``, and the two would change places for ever.
        """
        wanted, found = self.load([*ranked, job], job.request.tenant, measure), None
        for victim in {each.request.tenant: each for each in ranked}.values():
            tenant = victim.request.tenant
            left = self.load(ranked, tenant, measure) - measure(victim) / self.share(tenant)
            if tenant != job.request.tenant and left >= wanted:
                wanted, found = left, victim
        return found

    def leaves_others_theirs(self, job: Job, running: Iterable[Job], now: float) -> bool:
        """Return whether the owner of ``job`` can run it to its end without pages that others keep within their shares.

        Pages that others keep count while these still ask. The first job of an owner runs in any case.
        """
        shares, mine = self._cache.composition.policy.shares, owner_of(job.namespace)
        running = [*running, job]
        if shares is None or sum(owner_of(each.namespace) == mine for each in running) == 1:
            return True
        kept = {owner: tiers.get("device", {}) for owner, tiers in self._cache.stats().owners.items()}
        owned = {owner: [each for each in running if owner_of(each.namespace) == owner] for owner in {*kept, mine}}
        whole = sum(shares.get(owner, 1.0) for owner in owned)
        left = self._budget.capacities()
        for owner, jobs in owned.items():
            wanted = owner != mine and (bool(jobs) or now - self._asked.get(owner, now) < WANTED_SECONDS)
            part = shares.get(owner, 1.0) / whole if wanted else 0.0
            used = self._budget.pages_to_the_end(jobs)
            for name, pages in self._budget.capacities().items():
                left[name] -= max(used[name], min(kept.get(owner, {}).get(name, 0), int(pages * part)))
        return min(left.values(), default=0) >= 0

    def figures(self, running: Collection[Job], waiting: Collection[Job]) -> list[Figure]:
        """Tell how many requests each tenant runs and has waiting, if requests say whose they are."""
        samples = tuple(
            ((("tenant", tenant), ("state", state)), float(sum(job.request.tenant == tenant for job in jobs)))
            for tenant in self.served
            for state, jobs in (("running", running), ("waiting", waiting))
            if tenant
        )
        text = "requests of each tenant that run, or wait"
        return [Figure("prefixloom:tenant_requests", "gauge", text, samples)] if samples else []


def of_one(job: Job) -> int:
    return 1


def of_tokens(job: Job) -> int:
    """Return how many tokens a job that runs, or is about to run, has in the pools."""
    return job.launched if job.sequence is not None else len(job.tokens)
