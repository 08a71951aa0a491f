"""Plans, executes and evaluates trials. Runs in its own environment and imports no deep-learning framework.

plan ──► environments ──► execute ──► records ──► statistics ──► report, compare
"""

import sys

# jsonschema would build a grammar for internationalised addresses at each start of a process, which takes over a
# second; notebooks are held against a schema without any.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
