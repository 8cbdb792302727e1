package httpserver

import (
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
)

// ForOperators adds /metrics to the pages of an address for operators. Where only this machine can reach the address
// (local) it adds profiles as well, and the handler that it returns is behind LocalNames: profiles contain memory and
// cost CPU time. The command line, which may hold a password, is never served.
func ForOperators(pages *http.ServeMux, metrics http.Handler, local bool) http.Handler {
	pages.Handle("GET /metrics", metrics)
	if !local {
		return pages
	}
	pages.HandleFunc("GET /debug/pprof/", pprof.Index)
	pages.HandleFunc("GET /debug/pprof/cmdline", http.NotFound)
	pages.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	pages.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	pages.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return LocalNames(pages)
}

// LocalNames refuses requests that do not name localhost or an address as their host, so that no page in a browser on
// this machine can read the answers under a name of its own (DNS rebinding).
func LocalNames(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err != nil && host != "localhost" {
			http.Error(w, "the host must be localhost or an address", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
