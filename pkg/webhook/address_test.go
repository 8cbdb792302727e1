package webhook

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// forbiddenLiterals name, in one notation or another, an address that no
// callback may reach. PORT is replaced by that of a listening server.
var forbiddenLiterals = []string{
	// this machine
	"http://127.0.0.1:PORT/", "http://127.0.0.1./", "http://127.1:PORT/", "http://127.0.1/", "http://127.255.255.254/",
	"http://0.0.0.0:PORT/", "http://0:PORT/", "http://0x0/", "http://localhost:PORT/", "http://LocalHost./", "http://a.localhost/",
	"http://[::1]:PORT/", "http://[0:0:0:0:0:0:0:1]/", "http://[::]:PORT/", "http://[::ffff:127.0.0.1]:PORT/", "http://[::ffff:7f00:1]:PORT/",
	"http://[::127.0.0.1]:PORT/", "http://[0000::ffff:127.0.0.1]/",
	// numbers in other bases
	"http://2130706433:PORT/", "http://0x7f000001:PORT/", "http://0x7f.0.0.1/", "http://0177.0.0.1:PORT/", "http://017700000001/", "http://0x7f.1/",
	"http://127.0.0.0x1/", "http://00000127.0.0.1/", "http://4294967297/", "http://127.0.0.1.0x0/", "http://0xffffffffffffffffff/",
	// other scripts that fold to digits and dots
	"http://１２７.０.０.１/", "http://127。0。0。1/", "http://①②⑦.⓪.⓪.①/", "http://ⓛocalhost/", "http://127.0.0.1%00.example.com/", "http://127%2e0%2e0%2e1/",
	// private networks
	"http://10.0.0.1/", "http://10.255.255.255/", "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.0.1/", "http://0xc0a80001/", "http://3232235521/",
	"http://[fc00::1]/", "http://[fd12:3456:789a::1]/", "http://[fec0::1]/", "http://[::ffff:10.0.0.1]/", "http://[::ffff:192.168.1.1]/",
	// metadata services and link-local
	"http://169.254.169.254/latest/meta-data/", "http://2852039166/", "http://0xa9fea9fe/", "http://0251.0376.0251.0376/", "http://[::ffff:169.254.169.254]/",
	"http://[::ffff:a9fe:a9fe]/", "http://[fd00:ec2::254]/", "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[fe80::1%25lo]/", "http://metadata.google.internal/",
	"http://100.100.100.200/", "http://168.63.129.16/", "http://192.0.0.192/", "http://169.254.170.2/",
	// shared, reserved, documentation, benchmarks, multicast, broadcast
	"http://100.64.0.1/", "http://100.127.255.255/", "http://0.1.2.3/", "http://192.0.0.8/", "http://192.0.2.1/", "http://192.88.99.1/", "http://198.18.0.1/",
	"http://198.19.255.255/", "http://198.51.100.1/", "http://203.0.113.1/", "http://224.0.0.1/", "http://239.255.255.250/", "http://240.0.0.1/", "http://255.255.255.255/",
	"http://[ff02::1]/", "http://[ff0e::1]/", "http://[2001:db8::1]/", "http://[3fff::1]/", "http://[100::1]/", "http://[5f00::1]/",
	// IPv4 inside IPv6
	"http://[64:ff9b::127.0.0.1]/", "http://[64:ff9b::a9fe:a9fe]/", "http://[64:ff9b::10.0.0.1]/", "http://[64:ff9b:1::7f00:1]/", "http://[2002:7f00:1::]/",
	"http://[2002:a9fe:a9fe::1]/", "http://[2002:808:808::1]/", "http://[2001:0:7f00:1::]/", "http://[2001:10::1]/", "http://[::ffff:0:127.0.0.1]/",
	// not what they seem
	"http://user:pass@127.0.0.1/", "http://hooks.example.com@127.0.0.1:PORT/", "http://127.0.0.1:PORT#@hooks.example.com/", "http://127.0.0.1\\@hooks.example.com/",
	"http:127.0.0.1/", "http:///127.0.0.1/", "//127.0.0.1/", "http://127.0.0.1:PORT:80/", "http://hooks.example.com:0/", "http://hooks.example.com:99999/",
	"file:///etc/passwd", "gopher://127.0.0.1:PORT/_x", "ftp://127.0.0.1/", "unix:///var/run/docker.sock", "dict://127.0.0.1:PORT/", "javascript:alert(1)", "data:,x", "",
}

// forbiddenNames look harmless; what they resolve to is not.
var forbiddenNames = map[string][]string{
	"loop.example.com.":      {"127.0.0.1"},
	"loop6.example.com.":     {"::1"},
	"mapped.example.com.":    {"::ffff:127.0.0.1"},
	"any.example.com.":       {"0.0.0.0"},
	"meta.example.com.":      {"169.254.169.254"},
	"ten.example.com.":       {"10.1.2.3"},
	"carrier.example.com.":   {"100.64.1.1"},
	"ula.example.com.":       {"fd00::1"},
	"linklocal.example.com.": {"fe80::1"},
	"nat64.example.com.":     {"64:ff9b::7f00:1"},
	"sixtofour.example.com.": {"2002:7f00:1::1"},
	"teredo.example.com.":    {"2001:0:1::1"},
	"multi.example.com.":     {"224.0.0.1"},
	"several.example.com.":   {"10.0.0.1", "127.0.0.1", "169.254.169.254"},
}

func TestNoForbiddenAddressIsEverConnectedTo(t *testing.T) {
	var reached atomic.Int64
	server := listen(t, func(net.Conn) { reached.Add(1) })
	_, port, _ := net.SplitHostPort(server)
	dials := &dialCount{}
	dialer := net.Dialer{Resolver: resolver(t, fixed(forbiddenNames)), Control: dials.refuse}
	deliverer := newDeliverer(Config{Dialer: dialer})
	dial := AddressPolicy{}.Dialer(dialer)

	tried := 0
	attempt := func(raw string) {
		tried++
		if o := deliverer.deliver(t.Context(), message{ID: "m", URL: raw, Secrets: []Secret{NewSecret()}, Attempt: 1}); o.Kind != failed {
			t.Errorf("%s: outcome %s (%s), want failed", raw, o.Kind, o.Reason)
		}
		// The same once more past the check at registration, as if it had been
		// registered before the rule.
		if host, to := hostPort(raw); host != "" {
			if conn, err := dial(t.Context(), "tcp", to); err == nil {
				conn.Close()
				t.Errorf("%s: connected to %s", raw, to)
			} else if !errors.Is(err, ErrForbiddenAddress) && !unresolvable(err) {
				t.Errorf("%s: refused by %v, want the policy", raw, err)
			}
		}
	}
	for _, raw := range forbiddenLiterals {
		raw = strings.ReplaceAll(raw, "PORT", port)
		if _, err := (AddressPolicy{}).CheckURL(raw); !errors.Is(err, ErrForbiddenAddress) {
			t.Errorf("%s was registered (%v)", raw, err)
		}
		attempt(raw)
	}
	for name := range forbiddenNames {
		raw := "https://" + strings.TrimSuffix(name, ".") + "/"
		if _, err := (AddressPolicy{}).CheckURL(raw); err != nil {
			t.Errorf("%s: nothing is wrong with the name itself: %v", raw, err)
		}
		attempt(raw)
	}
	t.Logf("%d addresses tried, %d forbidden connections, %d reached the local server", tried, dials.count.Load(), reached.Load())
	if tried < 60 || dials.count.Load() != 0 || reached.Load() != 0 {
		t.Errorf("%d of %d addresses were connected to", dials.count.Load(), tried)
	}
}

// The test above counts nothing if its counter does not work.
func TestPublicAddressesAreConnectedTo(t *testing.T) {
	dials := &dialCount{}
	public := map[string][]string{"hooks.example.com.": {"93.184.215.14"}, "hooks6.example.com.": {"2606:4700::1111"}, "xn--bcher-kva.example.": {"8.8.8.8"}, "dns64.example.com.": {"64:ff9b::808:808"}}
	policy := AddressPolicy{AllowHTTP: true, Ports: []uint16{8080, 8443}}
	dial := policy.Dialer(net.Dialer{Resolver: resolver(t, fixed(public)), Control: dials.refuse})
	for i, raw := range []string{
		"https://hooks.example.com/x?y=z", "http://hooks6.example.com:8080/", "https://xn--bcher-kva.example/", "http://dns64.example.com/",
		"http://8.8.8.8/", "https://[2606:4700::1111]:8443/", "http://[64:ff9b::8.8.8.8]/", "http://172.32.0.1/", "http://100.128.0.1/", "http://192.169.0.1/", "http://223.255.255.255/", "http://HOOKS.example.com./",
	} {
		if _, err := policy.CheckURL(raw); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		_, to := hostPort(raw)
		if _, err := dial(t.Context(), "tcp", to); !errors.Is(err, errCounted) {
			t.Errorf("%s: %v", raw, err)
		}
		if got := dials.count.Load(); got != int64(i+1) {
			t.Errorf("%s: %d connections so far, want %d", raw, got, i+1)
		}
	}
}

// A name may change its mind between registration and delivery.
func TestRebindingIsRefusedWhenConnecting(t *testing.T) {
	var rebound atomic.Bool
	answers := func(string) []string {
		if rebound.Load() {
			return []string{"127.0.0.1"}
		}
		return []string{"93.184.215.14"}
	}
	dials := &dialCount{}
	dial := AddressPolicy{}.Dialer(net.Dialer{Resolver: resolver(t, answers), Control: dials.refuse})
	if _, err := dial(t.Context(), "tcp", "rebind.example.com:443"); !errors.Is(err, errCounted) {
		t.Fatal(err)
	}
	rebound.Store(true)
	if _, err := dial(t.Context(), "tcp", "rebind.example.com:443"); !errors.Is(err, ErrForbiddenAddress) || dials.count.Load() != 1 {
		t.Errorf("%v, %d connections", err, dials.count.Load())
	}
}

// A name with an address that is not allowed beside one that is: where that one does not answer, the receiver is down, and
// its messages come later. The dialer returns the error of the address that it tried first.
func TestAReceiverWithAForbiddenAddressBesideAnotherIsTriedAgain(t *testing.T) {
	both := map[string][]string{"a.example.com.": {"169.254.1.1", "93.184.215.14"}, "b.example.com.": {"10.0.0.1", "93.184.215.14"}, "c.example.com.": {"93.184.215.14", "fd00::1"}}
	for name := range both {
		dials := &dialCount{}
		d := newDeliverer(Config{Dialer: net.Dialer{Resolver: resolver(t, fixed(both)), Control: dials.refuse}})
		o := d.deliver(t.Context(), message{ID: "m", URL: "https://" + strings.TrimSuffix(name, ".") + "/", Secrets: []Secret{NewSecret()}, Attempt: 1})
		if o.Kind != retry || dials.count.Load() != 1 {
			t.Errorf("%s: %s (%s) after %d connections, want a retry after one", name, o.Kind, o.Reason, dials.count.Load())
		}
	}
}

func TestAllowListAdmitsInternalReceivers(t *testing.T) {
	internal := map[string][]string{"hooks.corp.internal.": {"10.1.2.3"}, "other.corp.example.": {"10.9.9.9"}, "evil.example.com.": {"10.1.2.3"}, "public.example.com.": {"93.184.215.14"}}
	for _, c := range []struct {
		name   string
		policy AddressPolicy
		url    string
		want   bool
	}{
		{"host by name", AddressPolicy{AllowHosts: []string{"Hooks.corp.internal"}}, "http://hooks.corp.internal/", true},
		{"only that host", AddressPolicy{AllowHosts: []string{"hooks.corp.internal"}}, "http://evil.example.com/", false},
		{"not hosts below it", AddressPolicy{AllowHosts: []string{"corp.internal"}}, "http://hooks.corp.internal/", false},
		{"network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}, "http://other.corp.example/", true},
		{"only that network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}, "http://evil.example.com/", false},
		{"literal in the network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, "http://127.0.0.1:9/", true},
		{"mapped literal in the network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, "http://[::ffff:127.0.0.1]:9/", true},
		{"literal as a host", AddressPolicy{AllowHosts: []string{"127.0.0.1"}}, "http://127.0.0.1:9/", true},
		{"port of an internal host", AddressPolicy{AllowHosts: []string{"hooks.corp.internal"}}, "http://hooks.corp.internal:9000/", true},
		{"http to a public address beside the network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}, "http://public.example.com:443/", false},
		{"port of a public address beside the network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}, "https://public.example.com:25/", false},
		{"https to a public address beside the network", AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}, "https://public.example.com/", true},
		{"https only", AddressPolicy{HTTPSOnly: true, AllowHosts: []string{"127.0.0.1"}}, "http://127.0.0.1:9/", false},
		{"https only, https", AddressPolicy{HTTPSOnly: true}, "https://8.8.8.8/", true},
	} {
		dials := &dialCount{}
		_, err := c.policy.CheckURL(c.url)
		if err == nil {
			_, to := hostPort(c.url)
			scheme, _, _ := strings.Cut(c.url, ":")
			ctx := context.WithValue(t.Context(), schemeKey{}, scheme)
			_, err = c.policy.Dialer(net.Dialer{Resolver: resolver(t, fixed(internal)), Control: dials.refuse})(ctx, "tcp", to)
		}
		if got := dials.count.Load() > 0; got != c.want {
			t.Errorf("%s: connected is %t, want %t (%v)", c.name, got, c.want, err)
		}
	}
}

func TestPublicReceiversNeedHTTPSAndPort443(t *testing.T) {
	for _, c := range []struct {
		url          string
		plain, ports bool // allowed by default, and with http and two more ports
	}{
		{"https://hooks.example.com/in", true, true},
		{"https://hooks.example.com:443/in", true, true},
		{"http://hooks.example.com/in", false, true},
		{"http://8.8.8.8/in", false, true},
		{"https://hooks.example.com:8443/in", false, true},
		{"http://hooks.example.com:8080/in", false, true},
		{"https://hooks.example.com:25/in", false, false},
		{"https://hooks.example.com:6379/in", false, false},
		{"http://hooks.example.com:22/in", false, false},
	} {
		_, err := AddressPolicy{}.CheckURL(c.url)
		_, err2 := AddressPolicy{AllowHTTP: true, Ports: []uint16{8443, 8080}}.CheckURL(c.url)
		if (err == nil) != c.plain || (err2 == nil) != c.ports {
			t.Errorf("%s: by default %v, with http and ports %v", c.url, err, err2)
		}
	}
}

// Whatever the spelling, an IPv4 address inside IPv6 is judged as itself.
func TestEmbeddedAddressesAreJudgedAsThemselves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], rapid.Uint32().Draw(t, "address"))
		v4 := netip.AddrFrom4(b)
		plain := AddressPolicy{}.checkAddr(v4) == nil
		mapped := AddressPolicy{}.checkAddr(netip.AddrFrom16(v4.As16())) == nil
		embedded := nat64.Addr().As16()
		copy(embedded[12:], b[:])
		if through := (AddressPolicy{}).checkAddr(netip.AddrFrom16(embedded)) == nil; mapped != plain || through != plain {
			t.Fatalf("%s: plain %t, mapped %t, NAT64 %t", v4, plain, mapped, through)
		}
		if plain && (v4.IsPrivate() || v4.IsLoopback() || v4.IsLinkLocalUnicast() || v4.IsMulticast() || v4.IsUnspecified()) {
			t.Fatalf("%s was allowed", v4)
		}
	})
}

func FuzzCheckURL(f *testing.F) {
	for _, raw := range forbiddenLiterals {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		u, err := AddressPolicy{}.CheckURL(raw)
		if err != nil {
			return
		}
		if addr, err := netip.ParseAddr(u.Hostname()); err == nil {
			if addr = addr.Unmap(); addr.IsPrivate() || addr.IsLoopback() || addr.IsLinkLocalUnicast() || addr.IsMulticast() {
				t.Errorf("%q was registered", raw)
			}
			return
		}
		// A second parser must see the same host.
		req, err := http.NewRequest(http.MethodPost, raw, nil) //nolint:noctx // never sent
		if err == nil && req.URL.Hostname() != u.Hostname() {
			t.Errorf("%q is %q or %q", raw, u.Hostname(), req.URL.Hostname())
		}
	})
}

var errCounted = errors.New("counted, not connected")

// dialCount counts the connections that the policy let through, and lets none
// of them happen.
type dialCount struct{ count atomic.Int64 }

func (d *dialCount) refuse(string, string, syscall.RawConn) error {
	d.count.Add(1)
	return errCounted
}

func hostPort(raw string) (host, to string) {
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" {
		return "", ""
	}
	port := u.Port()
	if port == "" && u.Scheme == "http" {
		port = "80"
	} else if port == "" {
		port = "443"
	}
	return u.Hostname(), net.JoinHostPort(u.Hostname(), port)
}

// unresolvable: there is no such name or port.
func unresolvable(err error) bool {
	var name *net.DNSError
	var port *net.AddrError
	return errors.As(err, &name) || errors.As(err, &port)
}

// listen accepts on a loopback port and hands connections to handle.
func listen(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			handle(conn)
			conn.Close()
		}
	}()
	return l.Addr().String()
}

// names tells what a name resolves to.
type names func(name string) []string

func fixed(answers map[string][]string) names {
	return func(name string) []string { return answers[name] }
}

// resolver answers by way of a name server of its own.
func resolver(t *testing.T, answers names) *net.Resolver {
	t.Helper()
	var config net.ListenConfig
	server, err := config.ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	go func() {
		packet := make([]byte, 1500)
		for {
			n, from, err := server.ReadFrom(packet)
			if err != nil {
				return
			}
			_, _ = server.WriteTo(answerName(packet[:n], answers), from)
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}

// answerName answers one question (RFC 1035, 4.1).
func answerName(query []byte, answers names) []byte {
	var name strings.Builder
	at := 12
	for query[at] != 0 {
		name.Write(query[at+1 : at+1+int(query[at])])
		name.WriteByte('.')
		at += 1 + int(query[at])
	}
	kind := binary.BigEndian.Uint16(query[at+1:])
	question := query[12 : at+5]
	var records []byte
	count := 0
	for _, text := range answers(strings.ToLower(name.String())) {
		addr := netip.MustParseAddr(text)
		data := addr.AsSlice()
		if (kind == 1) != (len(data) == 4) || (kind != 1 && kind != 28) {
			continue
		}
		count++
		records = append(records, 0xc0, 12, byte(kind>>8), byte(kind), 0, 1, 0, 0, 0, 0, 0, byte(len(data)))
		records = append(records, data...)
	}
	reply := append([]byte{}, query[:2]...)
	reply = append(reply, 0x81, 0x80, 0, 1, 0, byte(count), 0, 0, 0, 0)
	return append(append(reply, question...), records...)
}

func TestAllowedHostsAreNamesOrAddresses(t *testing.T) {
	for host, ok := range map[string]bool{
		"hooks.corp.internal": true, "127.0.0.1": true, "::1": true, "http://a.example": false, "a.example:8080": false,
		"[::1]": false, " a.example": false, "a.example/hook": false,
	} {
		if _, err := NewPolicy("leader.callback", AddressConfig{AllowHosts: []string{host}}); (err == nil) != ok {
			t.Errorf("%q: %v", host, err)
		}
	}
}
