"""Tells what happened: log, event feed, webhooks (Slack, PagerDuty), OpenTelemetry."""
