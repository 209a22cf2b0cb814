"""Django's tasks: ``django.tasks`` of Django 6, or else the backport ``django-tasks``."""

from __future__ import annotations

try:
    from django import tasks
    from django.tasks import base, exceptions, signals
    from django.tasks.backends.base import BaseTaskBackend
    from django.utils.json import normalize_json
except ImportError:
    try:
        import django_tasks as tasks
        from django_tasks import base, exceptions, signals
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.utils import normalize_json
    except ImportError:
        raise ImportError(
            "this version of Django has no django.tasks, and the backport is not installed: run `pip install django-tasks`, "
            "and add 'django_tasks' to INSTALLED_APPS"
        ) from None

__all__ = [
    "DEFAULT_ALIAS",
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "normalize_json",
    "signals",
    "task_backends",
]

DEFAULT_ALIAS = base.DEFAULT_TASK_BACKEND_ALIAS
Task = base.Task
TaskContext = base.TaskContext
TaskError = base.TaskError
TaskResult = base.TaskResult
TaskResultStatus = base.TaskResultStatus
InvalidTask = exceptions.InvalidTask if hasattr(exceptions, "InvalidTask") else exceptions.InvalidTaskError
TaskResultDoesNotExist = exceptions.TaskResultDoesNotExist
task_backends = tasks.task_backends
