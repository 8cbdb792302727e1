// Package changelog turns changes of tables into entries of other queues (change data capture by
// triggers).
//
// penstock.watch makes the changes of a table entries of a queue of kind change_log, in the
// transaction that makes the change: statement-level triggers with transition tables, one push for
// a statement. A task node runs them with a Handler, which calls an Impact function for the entries
// that a change implies and pushes these to other queues.
//
//	UPDATE orders ──trigger──► changes (change_log) ──Handler, Impact──► calc_fields, index, access lists
//
// # Example: calculated fields
//
// A field of an object is calculated from others. The queue of calculations is grouped by target
// object, so that one node calculates an object at a time, and mergeable, so that many changes of
// an object become one entry:
//
//	SELECT penstock.create_queue('changes', '{"kind": "change_log", "grouping": "object"}');
//	SELECT penstock.create_queue('calc_fields', '{"grouping": "target", "mergeable": true, "merge": "object"}');
//	SELECT penstock.watch('order_line', 'changes', ARRAY['order_id', 'price', 'amount']);
//
// Both queues can have their handlers in SQL (penstock.set_statements): then any task node runs
// them. The example test of this package has handlers in Go.
//
// # Loops
//
// A handler may write to watched tables, and so push entries whose handlers push entries. Entries
// that a transaction pushes are one level deeper than the entry it runs for (Descend). A push past
// depth 16 is refused with an error that names the queues of the loop. `ALTER DATABASE ... SET
// penstock.depth_max` sets another bound.
//
// # Cost of a watch
//
// BenchmarkUpdate measures it. A change_log queue should have no capacity: when it is full, writers are refused.
package changelog
