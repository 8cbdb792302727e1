-- Rows that functions make. No statement changes rows that exist.

-- The queue of callbacks holds payloads of all applications. It is of one that no token is limited to, and every task
-- node serves it.
SELECT penstock.create_queue('webhook', '{"kind": "webhook", "application": "penstock", "payload_limit": 1048576, "retry": {"max_attempts": 10}}')
 WHERE NOT EXISTS (SELECT FROM penstock.queue WHERE name = 'webhook');
