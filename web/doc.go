// Package web is the dashboard: pages of the state of the queues, with the verbs of operators,
// served by leaders.
//
// # A page
//
// A page is a row (type page) with an address below the dashboard's own, a template, and a function
// that reads a view model. It is added in one file of the package, by a method that the list in New
// calls, and one file of templates. The package has no SQL: pages read through pkg/operator and
// pkg/doctor, and each read goes through cached, which makes the read of many visitors one, and
// keeps the last value for the time in which the database does not answer.
//
// # One address, four forms
//
// A page is the same address in four forms: the whole document, the part of it that changes
// (?live=part, with an ETag), the points of its charts as JSON (?live=points), and a stream of both
// as server-sent events (?live=stream). All four come from one snapshot for each role, which is
// made at most once a second however many visitors there are.
//
// # Verbs
//
// A verb is a row too (type verb): GET displays a form with the objects that it would change and a
// field for the reason, POST carries it out and goes back. Forms need no script. A verb names the
// least role; templates do not offer it to others, and the address refuses them.
//
// # Roles
//
// A visitor logs in with a token of the API. Its scopes make the role: read a viewer, operate an
// operator, admin an administrator. A token that is limited to queues or applications is refused,
// since pages are about all of them.
package web
