package doctor

import "testing"

// What waits for a secret is no failure for 91 hours.
func TestCallbacksThatWaitForASecretAreNamed(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.create_queue('work')`)
	exec(t, pool, `SELECT penstock.push('work', '{}', callback => '{"url": "https://x.example/y"}') FROM generate_series(1, 3)`)
	exec(t, pool, `SELECT penstock.cancel_entry(id, 'test') FROM penstock.entry_work`)
	exec(t, pool, `DELETE FROM penstock.ready`)
	exec(t, pool, `
UPDATE penstock.entry_webhook SET status = 'initial', due_at = now() + interval '10 minutes', attempt = 1,
       history = penstock.history_add(NULL, '{"attempt": 1, "class": "error", "error": "receiver answered 503"}')`)
	want(t, find(t, pool, "callbacks", Config{}), Fine)
	exec(t, pool, `
UPDATE penstock.entry_webhook SET history = history || jsonb_build_object(
       'at', clock_timestamp() - interval '2 hours', 'attempt', 1, 'class', 'secret', 'error', 'another key')
 WHERE id < (SELECT max(id) FROM penstock.entry_webhook)`)
	want(t, find(t, pool, "callbacks", Config{}), Warning, "2 callbacks, the first since 2 h 0 m: another key", "tasknode.webhook.key")
}
