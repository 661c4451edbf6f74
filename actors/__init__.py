"""Who owns what, and how they talk. Each actor has one mailbox; messages are frozen records grouped by receiver.

system.py    the root: opens everything in order, is the Service that the doors use
bank.py      all segments, holds, leases, the memory budget          messages/bank.py
lane.py      rounds on the device thread                             messages/lane.py
session.py   one turn: admission, reading the reply, giving back     messages/session.py
rows_store.py, stager.py   what is on disk, and moving rows there and back
auditing.py, orders.py, disk_side.py   parts of the bank: audits when idle, orders to the device, its side of the disk
running.py   a turn inside the lane, pure; outbox.py: a bounded stream of pieces
service.py   what the doors need of a system, as a protocol
"""
