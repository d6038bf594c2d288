"""`triptych ctl`: orders to a running scheduler and questions about it, over the same link that APIs use.

It decides nothing and keeps nothing: one Control goes out, its answer is printed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ops.runtime_dir import live_directories
from protocol import wire
from protocol.channels import AddressError, ClientChannel, new_instance
from protocol.messages import Control, ControlReply, Goodbye, Hello, Refused, SchedulerToApi, Welcome
