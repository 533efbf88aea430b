from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rebind.serving.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LEASE_S, LONG_S = 0.05, 1000.0


def run(test: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test(asyncio.Event())

    asyncio.run(main())


def test_lease_that_nobody_renews_lapses_after_its_time() -> None:
    async def test(lapsed: asyncio.Event) -> None:
        began_s = time.monotonic()
        lease = Lease(LEASE_S, LONG_S, lapsed.set)
        assert 0 < lease.left_s <= LEASE_S
        await lapsed.wait()
        assert time.monotonic() - began_s >= LEASE_S
        assert lease.left_s == 0

    run(test)


def test_renewal_begins_it_anew() -> None:
    async def test(lapsed: asyncio.Event) -> None:
        lease = Lease(LEASE_S, LONG_S, lapsed.set)
        await asyncio.sleep(LEASE_S / 2)
        renewed_s = time.monotonic()
        lease.renew()
        await lapsed.wait()
        assert time.monotonic() - renewed_s >= LEASE_S

    run(test)


def test_it_can_be_renewed_when_it_lapses_but_not_beyond_its_limit() -> None:
    async def test(_: asyncio.Event) -> None:
        lapses_s: list[float] = []
        ended = asyncio.Event()

        def on_lapse() -> None:
            lapses_s.append(time.monotonic())
            if not lease.left_s and lapses_s[-1] >= began_s + limit_s:
                ended.set()
            else:
                lease.renew()

        began_s, limit_s = time.monotonic(), 4.5 * LEASE_S
        lease = Lease(LEASE_S, limit_s, on_lapse)
        await ended.wait()
        assert 2 <= len(lapses_s) <= 5
        lease.renew()
        assert lease.left_s == 0

    run(test)


def test_lease_that_was_cancelled_tells_nobody() -> None:
    async def test(lapsed: asyncio.Event) -> None:
        Lease(LEASE_S, LONG_S, lapsed.set).cancel()
        other = asyncio.Event()
        Lease(2 * LEASE_S, LONG_S, other.set)
        await other.wait()
        assert not lapsed.is_set()

    run(test)
