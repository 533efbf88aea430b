from __future__ import annotations

import asyncio
import threading

from rebind.scheduling.completions import Completions


def test_no_callback_is_lost_when_many_threads_post() -> None:
    async def scenario() -> None:
        completions = Completions(asyncio.get_running_loop())
        seen: list[int] = []
        finished = asyncio.Event()

        def note(value: int) -> None:
            seen.append(value)
            if len(seen) == 4000:
                finished.set()

        def post(start: int) -> None:
            for value in range(start, start + 1000):
                completions.post(lambda value=value: note(value))  # type: ignore[misc]

        threads = [threading.Thread(target=post, args=(start,)) for start in range(0, 4000, 1000)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(finished.wait(), 10)
        assert sorted(seen) == list(range(4000))
        for start in range(0, 4000, 1000):
            of_thread = [value for value in seen if start <= value < start + 1000]
            assert of_thread == sorted(of_thread)
        for thread in threads:
            thread.join()

    asyncio.run(scenario())
