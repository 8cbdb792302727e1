// Reads {"verify": [{secret, headers, body}], "sign": [{secret, id, at, body}]} from
// stdin and answers {"verified": [null | "why not"], "signed": ["v1,..."]}.
import { Webhook } from "standardwebhooks";
import { readFileSync } from "node:fs";

const task = JSON.parse(readFileSync(0, "utf8"));

const verified = task.verify.map(({ secret, headers, body }) => {
  try {
    new Webhook(secret).verify(body, headers);
    return null;
  } catch (problem) {
    return String(problem.message ?? problem);
  }
});

const signed = task.sign.map(({ secret, id, at, body }) =>
  new Webhook(secret).sign(id, new Date(at * 1000), body),
);

process.stdout.write(JSON.stringify({ verified, signed }));
