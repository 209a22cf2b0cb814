"""CPU-bound work in processes, which are killed when their result is no longer needed.

``primes.py work`` is a worker with two processes. ``primes.py below N`` counts the primes below N and shows the progress. It
cancels the job after ten seconds, whichever worker runs it. A thread could not be stopped like this.
"""

import os
import sys

import trio

import worqr

mesh = worqr.Mesh()


@mesh.task(name="primes", runs_in="process", timeout=60, result_ttl=60)
def count_primes(below: int) -> dict[str, int]:
    found: list[int] = []
    for number in range(2, below):
        if number % 10_000 == 0:
            worqr.current().progress(number / below)
        if all(number % prime for prime in found if prime * prime <= number):
            found.append(number)
    return {"primes": len(found), "pid": os.getpid()}


async def count(below: int) -> None:
    async with mesh.connect():
        job = await count_primes.dispatch(below)
        with trio.move_on_after(10):
            async with job.watch() as states:
                async for status in states:
                    if status.progress is not None:
                        print(f"{status.progress:.0%}")
            answer = await job.result()
            print(f"{answer['primes']} primes below {below}, counted by process {answer['pid']}")
            return
        stopped = await job.cancel(reason="it takes too long", wait=5)
        print(f"given up: {stopped.acknowledged} run was ended")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work"]:
            mesh.run(processes=2)
        case ["below", number]:
            trio.run(count, int(number))
        case _:
            sys.exit("usage: primes.py work | below N")
