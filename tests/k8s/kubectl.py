"""Stand in for kubectl: play recorded answers, and note each call.

STAND_IN_PLAY is a JSON file: {"get pods": [answer, ...], ...}. The first key that the words of a call begin with
(after --namespace) says what is printed: {"out": text or object, "err": text, "status": number}, one answer a
call, the last one again and again. STAND_IN_CALLS is the file to which calls are written, a JSON line each.
"""

import json
import os
import sys
import time
from pathlib import Path

words = [word for word in sys.argv[1:] if not word.startswith("--namespace=")]
stdin = sys.stdin.read() if "--filename=-" in words else ""
calls = Path(os.environ["STAND_IN_CALLS"])
before = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
play = json.loads(Path(os.environ["STAND_IN_PLAY"]).read_text())
key = next((key for key in play if " ".join(words).startswith(key)), None)
with calls.open("a") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "key": key, "stdin": stdin}) + "\n")
if key is None:
    sys.exit(f"error: nothing recorded for kubectl {' '.join(words)}")
count = sum(call["key"] == key for call in before)
answer = play[key][min(count, len(play[key]) - 1)]
time.sleep(answer.get("sleep_s", 0))
out = answer.get("out", "")
print(out if isinstance(out, str) else json.dumps(out), end="", flush=True)
print(answer.get("err", ""), end="", file=sys.stderr)
sys.exit(answer.get("status", 0))
