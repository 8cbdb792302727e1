-- Rows that functions make. Every statement leaves what is there alone.

SELECT penstock.create_queue('webhook', '{"kind": "webhook", "payload_limit": 1048576, "retry": {"max_attempts": 10}}')
 WHERE NOT EXISTS (SELECT FROM penstock.queue WHERE name = 'webhook');
