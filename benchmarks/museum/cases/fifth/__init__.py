"""The fifth round: written on 2026-11-20 by one who had read none of the rules."""
