import smtplib
from email.message import EmailMessage
from typing import assert_type

import trio

import worqr

mesh = worqr.Mesh()


@mesh.task(
    timeout=30,
    result_ttl=300,
    retry=worqr.RetryPolicy(max_failures=5, min_backoff=10, fail_on=(smtplib.SMTPRecipientsRefused,)),
)
def send_mail(to: str, subject: str, body: str = "") -> str:
    message = EmailMessage()
    message["To"], message["Subject"] = to, subject
    message.set_content(body)
    try:
        with smtplib.SMTP("localhost") as smtp:
            smtp.send_message(message)
    except smtplib.SMTPResponseException as error:
        if error.smtp_code == 421:
            raise worqr.Retry("greylisted", delay=60, counted=False) from error
        raise
    return str(message["Message-ID"])


@send_mail.on_failure
async def mail_gave_up(record: worqr.Failed) -> None:
    print("gave up on", send_mail.decode(record.task).args, record.error.type, record.error.message)


async def main() -> None:
    async with mesh.connect():
        await send_mail.enqueue("ada@example.org", subject="hi")
        job = await send_mail.options(delay=5, id="welcome-ada", if_exists="skip").dispatch("ada@example.org", "hi")
        assert_type(await job.result(timeout=10), str)
        assert_type(send_mail("x@example.org", "s"), str)
        await send_mail.enqueue("ada@example.org", subjekt="hi")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        handle = await send_mail.enqueue("ada@example.org", "hi")  # type: ignore[func-returns-value]
        await handle.result()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


trio.run(main)
