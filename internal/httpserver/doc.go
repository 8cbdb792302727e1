// Package httpserver has the HTTP servers of the programs: where they listen, which connections and requests they take,
// and the server for operators of the process.
//
//	listen.go   Listen opens a listener: TLS, certificates that are read again, bounds on connections
//	conns.go    the bounds on connections, and on the requests of one address
//	serve.go    Serve answers requests until it is told to end
//	status.go   a ResponseWriter that remembers the status
//	debug.go    metrics and profiles, for requests from this machine
package httpserver
