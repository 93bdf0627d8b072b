"""Everything that peers say and decide: messages, membership, overlay, journals, capacity. Pure.

No socket, file, process, wall clock or global randomness: a network, a clock and a
`random.Random` are handed in, and coroutines use plain asyncio, so that `sim/` runs the same code
on a virtual clock.
"""
