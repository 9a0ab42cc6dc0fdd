package connect

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Address is HOST:PORT of a server.
type Address struct {
	host  string
	port  uint16
	https bool
}

// ParseAddress parses HOST:PORT, which may start with http:// or https://.
func ParseAddress(text string) (Address, error) {
	invalid := fmt.Errorf("%q is not a valid address: write HOST:PORT", text)
	bare, https := strings.CutPrefix(text, "https://")
	if !https {
		bare = strings.TrimPrefix(text, "http://")
	}
	bare = strings.TrimSuffix(bare, "/")
	host, portText, err := net.SplitHostPort(bare)
	if err != nil {
		return Address{}, invalid
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || !isHost(host, bare[0] == '[') {
		return Address{}, invalid
	}
	return Address{host, uint16(port), https}, nil
}

// isHost says whether text may be the name or the IP address of a host. Only an IPv6 address has
// brackets around it.
func isHost(text string, inBrackets bool) bool {
	if inBrackets {
		ip, err := netip.ParseAddr(text)
		return err == nil && ip.Is6()
	}
	isPart := func(r rune) bool {
		return r == '.' || r == '-' || r == '_' || r > 127 ||
			('0' <= r && r <= '9') || ('a' <= r && r <= 'z') || ('A' <= r && r <= 'Z')
	}
	return text != "" && strings.IndexFunc(text, func(r rune) bool { return !isPart(r) }) < 0
}

// String is HOST:PORT, without a scheme.
func (a Address) String() string { return net.JoinHostPort(a.host, strconv.Itoa(int(a.port))) }

// IsRemote says whether a connection leaves the machine: the host is neither localhost nor a
// loopback or unspecified address.
func (a Address) IsRemote() bool {
	ip, err := netip.ParseAddr(a.host)
	if err != nil {
		return !strings.EqualFold(a.host, "localhost")
	}
	return !ip.Unmap().IsLoopback() && !ip.IsUnspecified()
}
