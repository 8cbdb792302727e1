-- Notifications to nodes and gateways.

-- notify sends a notification on the channel of Penstock when the transaction commits, unless the server's queue of
-- NOTIFY is nearly full: a commit with a notification fails when it is full, and takes what the transaction did with
-- it. Receivers of notifications poll as well.
-- Locks: none.
-- Callers: cancel_one, announce_instance, note_ready, hand_over_slots, preempt_durable, lease_slots_within.
CREATE OR REPLACE FUNCTION penstock.notify(message text) RETURNS void
LANGUAGE sql AS $$
    SELECT pg_notify('penstock', message) WHERE pg_notification_queue_usage() < 0.9
$$;
