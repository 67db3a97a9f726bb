//! Page descriptors (`struct page`): what the kernel knows of each page frame, and when that allows a dump to leave the
//! page out.
//!
//! The tests and their order are makedumpfile's, because people compare with its numbers. Kernels keep the same facts
//! in different fields, and VMCOREINFO tells which:
//! ```text
//!                         until 6.2            6.3 - 6.5            6.6 - 6.8        from 6.9
//! order of a compound     page.compound_order  folio._folio_order   low byte of the second descriptor's flags
//! is it hugetlb           page.compound_dtor   folio._folio_dtor    a flag of these  page type
//! slab                    flag                 flag                 flag             page type from 6.10
//! page type               32 bits, all set but one for each type; from 6.12 a number in the top byte
//! ```
//! In addition to makedumpfile's tests, a descriptor that excludes its page must be one that a kernel can write. With
//! random bytes in place of descriptors makedumpfile left out half of the pages; here they are kept.

use super::super::level::DumpLevel;
use super::address_space::is_kernel_address;
use super::{NotUnderstood, Vmcoreinfo, required};

/// Accepted sizes of a descriptor. The kernel's has 64 bytes, or a little less or more.
const DESCRIPTOR_BYTES: std::ops::RangeInclusive<u64> = 32..=256;
/// Largest order: 1 GiB, the largest compound page of x86.
const ORDER_MAX: u32 = 18;
/// Number of orders of free blocks, where the kernel does not tell it: up to 4 MiB.
const FREE_ORDERS: u64 = 11;
/// Limit for a page's number of users: 16 million. A pinned page counts 1024 for each pin.
const USERS_MAX: u32 = 1 << 24;
const ANONYMOUS: u64 = 1;
const TAIL: u64 = 1;
/// Bits that say that there is a type at all, before 6.12.
const TYPED: u32 = 0xf000_0000;

/// Why a page is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Cache,
    PrivateCache,
    User,
    Free,
    /// Its hardware is broken: reading it is dangerous.
    Poisoned,
    /// Given back to the host, by a balloon for example.
    Offline,
}

/// Verdict on a page by its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Keep,
    /// Leave out this page and those after it, 2^order in all.
    Exclude(Class, u32),
    /// No kernel writes such a descriptor, so the page is kept.
    Implausible,
}

/// How to read this kernel's descriptors, and what a dump level leaves out.
#[derive(Debug)]
pub struct Rules {
    level: DumpLevel,
    pub bytes: usize,
    flags: usize,
    users: usize,
    mapping: usize,
    mapcount: usize,
    private: usize,
    compound_head: usize,
    /// Whether a tail has the address of its head; later kernels have a mask there.
    tail_names_head: bool,
    lru: u64,
    private_flag: u64,
    swap_cache: u64,
    swap_backed: Option<u64>,
    head: u64,
    slab_flag: u64,
    poisoned: u64,
    slab: Option<PageType>,
    buddy: u32,
    offline: Option<u32>,
    unaccepted: Option<u32>,
    free_orders: u64,
    /// Top bits of the flags: node and zone of the page.
    place: u64,
    compound: Compound,
}

/// Where the second descriptor of a compound page has its order, and how hugetlb pages are marked.
#[derive(Debug)]
enum Compound {
    /// Both are fields at these offsets, of 2 bytes before 4.16 and of 1 byte since.
    Fields { order: Option<usize>, kind: Option<usize>, wide: bool, hugetlb: Option<u64> },
    /// Order in the low byte of the flags; hugetlb is a flag.
    Flag(u64),
    /// Order as in `Flag`; hugetlb is a type of the first page.
    Type(PageType),
}

/// A value of `_mapcount`, the field that counts mappings in pages that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageType {
    mask: u32,
    value: u32,
}

impl PageType {
    fn new(number: i64) -> Self {
        // Before 6.12 a type is one bit that is cleared, and the field may count in its lower bits.
        let value = number as u32;
        if value << 8 == 0 { Self { mask: 0xff00_0000, value } } else { Self { mask: TYPED | !value, value: TYPED } }
    }

    fn is(self, mapcount: u32) -> bool {
        mapcount & self.mask == self.value
    }
}

impl Rules {
    /// Rules for the kernel with this VMCOREINFO.
    pub fn new(vmcoreinfo: &Vmcoreinfo, level: DumpLevel) -> Result<Self, NotUnderstood> {
        let bytes = required(vmcoreinfo.size("page"), "SIZE(page)")?;
        if !DESCRIPTOR_BYTES.contains(&bytes) {
            return Err(NotUnderstood::Implausible { name: "SIZE(page)", value: bytes.into() });
        }
        let tell = FieldLookup { vmcoreinfo, bytes };
        let compound_head = tell.offset_if_told("page.compound_head", 8)?;
        let tail_names_head = compound_head.is_some();
        let compound_head = match compound_head {
            Some(offset) => offset,
            None => tell.offset("page.compound_info", "OFFSET(page.compound_head)", 8)?,
        };
        let buddy = required(vmcoreinfo.number("PAGE_BUDDY_MAPCOUNT_VALUE"), "NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)")?;
        let page_type = |name| vmcoreinfo.number(name).map(|number| number as u32);
        Ok(Self {
            level,
            bytes: bytes as usize,
            flags: tell.offset("page.flags", "OFFSET(page.flags)", 8)?,
            users: tell.offset("page._refcount", "OFFSET(page._refcount)", 4)?,
            mapping: tell.offset("page.mapping", "OFFSET(page.mapping)", 8)?,
            mapcount: tell.offset("page._mapcount", "OFFSET(page._mapcount)", 4)?,
            private: tell.offset("page.private", "OFFSET(page.private)", 8)?,
            compound_head,
            tail_names_head,
            lru: required(tell.flag("PG_lru"), "NUMBER(PG_lru)")?,
            private_flag: required(tell.flag("PG_private"), "NUMBER(PG_private)")?,
            swap_cache: required(tell.flag("PG_swapcache"), "NUMBER(PG_swapcache)")?,
            swap_backed: tell.flag("PG_swapbacked"),
            head: required(vmcoreinfo.number("PG_head_mask"), "NUMBER(PG_head_mask)")?.cast_unsigned(),
            slab_flag: tell.flag("PG_slab").unwrap_or(0),
            poisoned: tell.flag("PG_hwpoison").unwrap_or(0),
            slab: vmcoreinfo.number("PAGE_SLAB_MAPCOUNT_VALUE").map(PageType::new),
            buddy: buddy as u32,
            offline: page_type("PAGE_OFFLINE_MAPCOUNT_VALUE"),
            unaccepted: page_type("PAGE_UNACCEPTED_MAPCOUNT_VALUE"),
            free_orders: vmcoreinfo.length("zone.free_area").unwrap_or(FREE_ORDERS).min(u64::from(ORDER_MAX) + 1),
            place: tell.place(),
            compound: tell.compound()?,
        })
    }

    /// Verdict on a descriptor that is no tail, given the one after it, if there is one.
    pub fn judge(&self, page: &[u8], next: Option<&[u8]>, pfn: u64) -> Verdict {
        let flags = u64_at(page, self.flags);
        let mapcount = u32_at(page, self.mapcount);
        let slab = self.slab.is_some_and(|slab| slab.is(mapcount)) || flags & self.slab_flag != 0;
        if self.level.excludes_free() {
            if mapcount == self.buddy && !slab {
                return self.free(page, pfn, u64_at(page, self.private));
            }
            if self.unaccepted == Some(mapcount) {
                return self.free(page, pfn, self.free_orders - 1);
            }
        }
        let (order, hugetlb) = self.compound(flags, mapcount, next);
        match self.class(page, flags, mapcount, slab, hugetlb) {
            None => Verdict::Keep,
            Some(class) => match order {
                Some(order) if self.is_plausible(class, page, mapcount, hugetlb) && is_aligned(pfn, order) => {
                    Verdict::Exclude(class, order)
                }
                _ => Verdict::Implausible,
            },
        }
    }

    fn free(&self, page: &[u8], pfn: u64, order: u64) -> Verdict {
        if order >= self.free_orders || !is_aligned(pfn, order as u32) || self.is_used(page) {
            return Verdict::Implausible;
        }
        Verdict::Exclude(Class::Free, order as u32)
    }

    fn class(&self, page: &[u8], flags: u64, mapcount: u32, slab: bool, hugetlb: bool) -> Option<Class> {
        let anonymous = u64_at(page, self.mapping) & ANONYMOUS != 0 && !slab;
        let private = flags & self.private_flag != 0;
        let swapped = flags & self.swap_cache != 0 && self.swap_backed.is_none_or(|backed| flags & backed != 0);
        let cache = (flags & self.lru != 0 || swapped) && !anonymous;
        if cache && !private && (self.level.excludes_cache() || self.level.excludes_private_cache()) {
            return Some(Class::Cache);
        }
        if cache && private && self.level.excludes_private_cache() {
            return Some(Class::PrivateCache);
        }
        if self.level.excludes_user() && (anonymous || hugetlb) {
            return Some(Class::User);
        }
        if flags & self.poisoned != 0 {
            return Some(Class::Poisoned);
        }
        (self.offline == Some(mapcount) && !slab).then_some(Class::Offline)
    }

    /// Order of the compound page that begins here, and whether it is hugetlb. The order is 0 for a single page, and
    /// `None` for a compound page that cannot exist.
    fn compound(&self, flags: u64, mapcount: u32, next: Option<&[u8]>) -> (Option<u32>, bool) {
        if flags & self.head == 0 {
            return (Some(0), false);
        }
        let Some(next) = next else { return (None, false) };
        if u64_at(next, self.compound_head) & TAIL == 0 {
            return (None, false);
        }
        let in_flags = || u64_at(next, self.flags) & 0xff;
        let (order, hugetlb) = match &self.compound {
            Compound::Type(hugetlb) => (in_flags(), hugetlb.is(mapcount)),
            Compound::Flag(hugetlb) => (in_flags(), u64_at(next, self.flags) & hugetlb != 0),
            Compound::Fields { order, kind, wide, hugetlb } => {
                let field = |offset| if *wide { u16_at(next, offset) } else { u64::from(next[offset]) };
                let kind = kind.map(field);
                // Without such a field the order is not known, and the verdict is on the first page alone.
                let Some(order) = order else { return (Some(0), kind.is_some() && kind == *hugetlb) };
                (field(*order), kind.is_some() && kind == *hugetlb)
            }
        };
        let order = u32::try_from(order).ok().filter(|order| (1..=ORDER_MAX).contains(order));
        (order, hugetlb)
    }

    /// Whether a kernel could have written this descriptor for a page of this class.
    fn is_plausible(&self, class: Class, page: &[u8], mapcount: u32, hugetlb: bool) -> bool {
        let mapping = u64_at(page, self.mapping);
        let mapped = mapcount.wrapping_add(1) <= USERS_MAX;
        let counts_mappings = matches!(class, Class::Cache | Class::PrivateCache | Class::User) && !hugetlb;
        (mapping == 0 || is_kernel_address(mapping))
            && u32_at(page, self.users) < USERS_MAX
            && (mapped || !counts_mappings && mapcount >= TYPED)
    }

    /// The file that a page of the page cache belongs to (`struct address_space`), and flags of the page.
    pub fn mapping_and_flags(&self, page: &[u8]) -> (u64, u64) {
        (u64_at(page, self.mapping), u64_at(page, self.flags))
    }

    /// Node and zone of a page, which it shares with its neighbours.
    pub fn place(&self, page: &[u8]) -> u64 {
        u64_at(page, self.flags) & self.place
    }

    /// Whether the page has users, even an impossible number of them.
    pub fn is_used(&self, page: &[u8]) -> bool {
        u32_at(page, self.users) != 0
    }

    /// Whether the page is part of a compound page and not its first.
    pub fn is_tail(&self, page: &[u8]) -> bool {
        u64_at(page, self.compound_head) & TAIL != 0
    }

    /// Whether this tail's head is before it. `map` is where the descriptor of page frame 0 would be.
    pub fn is_plausible_tail(&self, page: &[u8], pfn: u64, map: u64) -> bool {
        !self.tail_names_head || self.head_of(page, map).is_some_and(|head| head < pfn)
    }

    /// Whether this descriptor belongs to the compound page that begins at `head`. Hugetlb pages may share descriptors,
    /// even that of a first page, which then looks like another first page.
    pub fn belongs(&self, page: &[u8], head: u64, map: u64) -> bool {
        if self.is_tail(page) {
            return !self.tail_names_head || self.head_of(page, map) == Some(head);
        }
        u64_at(page, self.flags) & self.head != 0
    }

    fn head_of(&self, tail: &[u8], map: u64) -> Option<u64> {
        let distance = (u64_at(tail, self.compound_head) & !TAIL).wrapping_sub(map);
        distance.is_multiple_of(self.bytes as u64).then_some(distance / self.bytes as u64)
    }
}

/// Looks up facts about descriptors in VMCOREINFO.
struct FieldLookup<'a> {
    vmcoreinfo: &'a Vmcoreinfo,
    bytes: u64,
}

impl FieldLookup<'_> {
    fn offset(&self, member: &str, name: &'static str, width: u64) -> Result<usize, NotUnderstood> {
        required(self.offset_if_told(member, width)?, name)
    }

    fn offset_if_told(&self, member: &str, width: u64) -> Result<Option<usize>, NotUnderstood> {
        self.vmcoreinfo.offset(member).map(|offset| self.within(offset, width)).transpose()
    }

    fn within(&self, offset: u64, width: u64) -> Result<usize, NotUnderstood> {
        let fits = offset.checked_add(width).is_some_and(|end| end <= self.bytes);
        let refusal = NotUnderstood::Implausible { name: "an offset in struct page", value: offset.into() };
        fits.then_some(offset as usize).ok_or(refusal)
    }

    /// A flag by the number of its bit.
    fn flag(&self, name: &str) -> Option<u64> {
        let bit = u32::try_from(self.vmcoreinfo.number(name)?).ok()?;
        1_u64.checked_shl(bit)
    }

    /// Mask of node and zone. Node numbers are in the top bits, if there are any, and zones below them; there are at
    /// least three zones.
    fn place(&self) -> u64 {
        const ZONE_BITS: u32 = 2;
        let nodes = self.vmcoreinfo.length("node_data").unwrap_or(1).clamp(1, 1 << 10);
        let bits = nodes.next_power_of_two().trailing_zeros() + ZONE_BITS;
        !(u64::MAX >> bits)
    }

    fn compound(&self) -> Result<Compound, NotUnderstood> {
        if let Some(hugetlb) = self.vmcoreinfo.number("PAGE_HUGETLB_MAPCOUNT_VALUE") {
            return Ok(Compound::Type(PageType::new(hugetlb)));
        }
        if let Some(hugetlb) = self.flag("PG_hugetlb") {
            return Ok(Compound::Flag(hugetlb));
        }
        let wide = self.vmcoreinfo.version().is_some_and(|version| version < (4, 16));
        let width = if wide { 2 } else { 1 };
        let field = |page: &str, folio: &str| match self.vmcoreinfo.offset(folio) {
            // The second descriptor of a folio begins where the first one ends.
            Some(offset) => self.within(offset.wrapping_sub(self.bytes), width).map(Some),
            None => self.offset_if_told(page, width),
        };
        Ok(Compound::Fields {
            order: field("page.compound_order", "folio._folio_order")?,
            kind: field("page.compound_dtor", "folio._folio_dtor")?,
            wide,
            hugetlb: self.vmcoreinfo.number("HUGETLB_PAGE_DTOR").map(i64::cast_unsigned),
        })
    }
}

fn is_aligned(pfn: u64, order: u32) -> bool {
    pfn.trailing_zeros() >= order
}

fn u64_at(page: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(page[offset..offset + 8].try_into().expect("eight bytes"))
}

fn u32_at(page: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(page[offset..offset + 4].try_into().expect("four bytes"))
}

fn u16_at(page: &[u8], offset: usize) -> u64 {
    u16::from_le_bytes(page[offset..offset + 2].try_into().expect("two bytes")).into()
}
