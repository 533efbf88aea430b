from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time on a shared machine says nothing about the code.
settings.register_profile("config", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("config")
